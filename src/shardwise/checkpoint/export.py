"""The result of a run: a Hugging Face model folder (or a PEFT adapter folder), published atomically."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

CHECK = "shardwise_check.json"


def gathered_state(engine: Any, *, zero_stage: int) -> dict[str, torch.Tensor] | None:
    """The whole state dict on rank 0, None elsewhere. Every rank must call it: zero3 gathers."""
    if zero_stage == 3:
        state: dict[str, torch.Tensor] | None = engine._zero3_consolidated_16bit_state_dict()
        return state or None
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    return {name: tensor.detach().cpu() for name, tensor in engine.module.state_dict().items()}


def write_final(folder: Path, module: Any, state: dict[str, torch.Tensor], tokenizer: Any, *,
                chat_template: str | None, check: dict[str, Any]) -> None:
    """Weights (tied ones once), config, generation config, tokenizer and template, on rank 0.

    `check` holds prompt ids and the live model's logits after them, so that a copy can be proven equal.
    """
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    module.config.dtype = next(iter(state.values())).dtype
    # Training switches the cache off in some models; a user of the result wants it.
    module.config.use_cache = True
    module.save_pretrained(beside, state_dict=state)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(beside)
    (beside / CHECK).write_text(json.dumps(check))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def check_logits(model: torch.nn.Module, ids: list[int], device: torch.device) -> list[float]:
    """Logits (fp32, the whole vocabulary) after the given ids, in the dtype the weights are held in."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1]
    model.train(training)
    values: list[float] = logits.float().cpu().tolist()
    return values
