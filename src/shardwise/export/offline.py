"""`shardwise export`: from a checkpoint to a Hugging Face folder, on one CPU process."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import layout
from shardwise.config.schema import ModelConfig
from shardwise.errors import CheckpointError, UserError
from shardwise.export import card, merge, skeleton, weights, write
from shardwise.export.live import check_logits
from shardwise.export.runs import Run, choose_checkpoint, read_metrics
from shardwise.model.adapters import add_adapter


@dataclass(frozen=True)
class Wish:
    """What the user asked for; None is the default."""

    checkpoint: str | None = None
    merge_lora: bool = False
    dtype: str | None = None
    output: str | None = None
    overwrite: bool = False


def export(run: Run, wish: Wish) -> tuple[Path, list[str]]:
    """Write the folder; returns it and what there is to say. Raises UserError before anything is read in full."""
    lora = run.config.adapter.kind != "none"
    if wish.merge_lora and not lora:
        raise UserError(f"{run.folder}: --merge-lora, but this run trained all weights (adapter.kind=none); "
                        "leave the flag out")
    checkpoint = choose_checkpoint(run, wish.checkpoint)
    meta = layout.read_meta(checkpoint)
    strategy, step = str(meta["strategy"]), int(meta["step"])
    kind = "merged" if wish.merge_lora else "adapter" if lora else "model"
    dtype = wish.dtype or (_name_of(merge.seen_dtype(run.config, strategy)) if kind == "merged"
                           else write.result_dtype(strategy, run.config.precision))
    folder = Path(wish.output).absolute() if wish.output else run.folder / "exports" / f"step-{step:08d}-{kind}-{dtype}"
    write.refuse_existing(folder, overwrite=wish.overwrite)
    if not (run.skeleton / "config.json").is_file():
        raise UserError(f"{run.skeleton}: not there; the run was started by a version of shardwise that kept no "
                        "tokenizer and config, and its final/ folder is all there is")
    base = merge.base_name(run) if lora else ""
    if kind == "merged":
        merge.refuse_other_base(run, base)
    weights.check_files(checkpoint, meta)
    module, state = _weights(run, checkpoint, meta, kind=kind, dtype=write.DTYPES[dtype], base=base)
    record = {"run": str(run.folder), "step": step, "kind": kind, "merged": kind == "merged",
              "base": run.manifest.get("base")}
    page = card.card(run.manifest, read_metrics(run.folder / "metrics.jsonl"), step=step, kind=kind, dtype=dtype)
    with write.published(folder) as part:
        write.write_model(part, module, state, frame=run.skeleton, wanted=write.wanted_weights(module), card=page,
                          record=record)
        del module
        said = _check(run, part, kind=kind, base=base, strategy=strategy)
    return folder, said


def _weights(run: Run, checkpoint: Path, meta: dict[str, Any], *, kind: str, dtype: torch.dtype, base: str
             ) -> tuple[Any, dict[str, torch.Tensor]]:
    """The module that writes itself, and its state."""
    model: ModelConfig = run.config.model
    module = skeleton.empty_model(run.skeleton, dtype=dtype, trust_remote_code=model.trust_remote_code)
    module.name_or_path = base
    if kind == "model":
        buffers = skeleton.buffers(run.skeleton)
        wanted = {name: shape for name, shape in write.wanted_weights(module).items() if name not in buffers}
        return module, _read(checkpoint, meta, wanted, dtype) | buffers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ties; what a warning would mend is settled in merge.py
        module = add_adapter(module, run.config.adapter)
    wanted = write.wanted_weights(module)
    if kind == "adapter":
        return module, _read(checkpoint, meta, wanted, dtype)
    trained = _read(checkpoint, meta, wanted, torch.float32)
    merged = merge.merge(merge.load_base(run, base, strategy=str(meta["strategy"])), run, trained, dtype=dtype)
    return merged, {name: tensor.detach() for name, tensor in merged.state_dict().items()}


def _read(checkpoint: Path, meta: dict[str, Any], wanted: weights.Shapes, dtype: torch.dtype
          ) -> dict[str, torch.Tensor]:
    saved = {name: tuple(shape) for name, shape in meta.get("shapes", {}).items()}
    weights.refuse_unlike(saved, wanted, f"{checkpoint} (shapes in {layout.META})")
    return weights.read(checkpoint, wanted, dtype=dtype)


def _check(run: Run, folder: Path, *, kind: str, base: str, strategy: str) -> list[str]:
    """Read the folder back as a user would, and keep the logits it gives."""
    from transformers import AutoModelForCausalLM

    trust = run.config.model.trust_remote_code
    if kind != "adapter":
        model, found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True,
                                                            trust_remote_code=trust)
        wrong = {key: sorted(map(str, names)) for key, names in found.items() if names}
        if wrong:
            raise CheckpointError(f"{folder}: what was written does not load as what it is: {wrong}")
    else:
        try:
            merge.refuse_other_base(run, base)
        except CheckpointError as error:
            return [f"the adapter was not tried on its base: {error}"]
        from peft import PeftModel

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(merge.load_base(run, base, strategy=strategy), str(folder))
    ids = skeleton.check_ids(run.skeleton)
    logits = check_logits(model, ids, torch.device("cpu"))
    if not all(map(math.isfinite, logits)):
        raise CheckpointError(f"{folder}: the model that was written gives logits that are not finite")
    write.write_check(folder, ids, logits, of="export")
    return []


def _name_of(dtype: torch.dtype) -> str:
    return next(name for name, known in write.DTYPES.items() if known == dtype)
