"""RUN/skeleton: all of a model but its trained weights, kept from the start of a run.

Config, generation config, tokenizer with its chat template, buffers that belong to the weights, and the tokens
that results are checked with. With it and a checkpoint a model can be put together when its origin is gone.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import custom_object_save

BUFFERS, CHECK_IDS = "buffers.safetensors", "check_ids.json"
OWN = (BUFFERS, CHECK_IDS, "config.json", "generation_config.json")
"""Files that a result has from elsewhere, or not at all."""


def save(folder: Path, module: Any, tokenizer: Any, *, chat_template: str | None, check_ids: list[int]) -> None:
    """Write the skeleton of a live model, whatever its strategy; on rank 0, without a collective."""
    base = module.get_base_model() if hasattr(module, "peft_config") else module
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    base.config.save_pretrained(beside)
    if base.can_generate():
        base.generation_config.save_pretrained(beside)
    if base.is_remote_code():
        custom_object_save(base, beside, config=base.config)
    weights = {name for name, _ in base.named_parameters(remove_duplicate=False)}
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in base.state_dict().items()
            if name not in weights}
    if kept and base is module:  # an adapter is merged into a base that has its own
        save_file(kept, beside / BUFFERS)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(beside)
    (beside / CHECK_IDS).write_text(json.dumps(check_ids), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def empty_model(folder: Path, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model with parameters that have names, shapes and ties but no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def buffers(folder: Path) -> dict[str, torch.Tensor]:
    """The buffers that belong to the weights; none for most models."""
    return dict(load_file(folder / BUFFERS)) if (folder / BUFFERS).is_file() else {}


def check_ids(folder: Path) -> list[int]:
    """Token ids of the start of one training example."""
    return list(json.loads((folder / CHECK_IDS).read_text(encoding="utf-8")))


def copy_tokenizer(folder: Path, target: Path) -> None:
    """Tokenizer files and chat template, byte for byte."""
    for path in folder.iterdir():
        if path.name not in OWN and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
