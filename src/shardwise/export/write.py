"""The one writer of results: a Hugging Face model folder or a PEFT adapter folder, published atomically."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import UserError
from shardwise.export import skeleton
from shardwise.export.runs import RECORD, read_record, write_json
from shardwise.export.weights import Shapes, refuse_unlike

CHECK, CARD = "shardwise_check.json", "README.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def result_dtype(strategy: str, precision: str) -> str:
    """The dtype of `final/`: fp32 where the weights are held in fp32 (ddp), else that of the arithmetic."""
    return "fp32" if strategy == "ddp" else precision


def wanted_weights(module: Any) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of what a result holds: all parameters, tied ones once, and the buffers saved with
    them; of an adapter the trained parameters."""
    shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape))
              for name, parameter in module.named_parameters() if parameter.requires_grad or not _is_adapter(module)}
    if not _is_adapter(module):
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        shapes |= {name: tuple(tensor.shape) for name, tensor in module.state_dict().items() if name not in names}
    return shapes


def _is_adapter(module: Any) -> bool:
    return hasattr(module, "peft_config")


def refuse_existing(folder: Path, *, overwrite: bool) -> None:
    """Raises UserError unless `folder` is free, or an earlier export that may be replaced."""
    if not folder.exists():
        return
    if not read_record(folder):
        raise UserError(f"{folder} exists and is not a folder that shardwise exported; give another one with --output")
    if not overwrite:
        raise UserError(f"{folder} exists; give another one with --output, or --overwrite to replace it")


@contextlib.contextmanager
def published(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place when the block ends without an error."""
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def write_model(folder: Path, module: Any, state: dict[str, torch.Tensor], *, frame: Path, wanted: Shapes, card: str,
                record: dict[str, Any]) -> None:
    """Weights (tied ones once), config, generation config, tokenizer and template, card and record, on rank 0.

    `state` may hold more than `wanted` (frozen weights, second names of tied ones); it is used up. `frame` is the
    run's skeleton. Raises CheckpointError when a wanted weight is missing or of another shape.
    """
    kept = {name: tensor for name, tensor in state.items() if name in wanted}
    refuse_unlike({name: tuple(tensor.shape) for name, tensor in kept.items()}, wanted, str(folder.parent))
    state.clear()
    dtype = next(iter(kept.values())).dtype
    if _is_adapter(module):
        # Vocabularies are never resized here, so embeddings that were not trained need not be in it.
        module.save_pretrained(folder, state_dict=kept, save_embedding_layers=False)
    else:
        module.config.dtype = dtype
        # Training switches the cache off in some models; a user of the result wants it.
        module.config.use_cache = True
        module.save_pretrained(folder, state_dict=kept)
    skeleton.copy_tokenizer(frame, folder)
    (folder / CARD).write_text(card, encoding="utf-8")  # in place of PEFT's, which is empty
    write_json(folder / RECORD, {"dtype": str(dtype).removeprefix("torch."), **record})


def write_check(folder: Path, ids: list[int], logits: list[float], *, of: str) -> None:
    """Prompt ids and the logits after them, of the `live` model or of the `export` read back."""
    (folder / CHECK).write_text(json.dumps({"input_ids": ids, "logits": logits, "of": of}), encoding="utf-8")
