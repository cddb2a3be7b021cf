"""Whether a model keeps packed examples apart is asked of the model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dist.given import TINY, save_model
from shardwise.model.probes import isolates, packing_leak

GPT_OSS = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8,
           "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1,
           "initializer_range": 0.15, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}


def leak_of(folder: Path, model_type: str, attention: str, fields: dict[str, Any]) -> float:
    save_model(folder, model_type, **fields)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    model.train()
    leak = packing_leak(model, vocabulary=64, device=torch.device("cpu"), autocast=contextlib.nullcontext)
    assert model.training  # left as it was found
    return leak


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt_neox"])
def test_llama_and_its_kin_isolate(model_type: str, attention: str, tmp_path: Path) -> None:
    leak = leak_of(tmp_path / "m", model_type, attention, TINY)
    assert leak <= 1e-6 and isolates(leak, low_precision=False)


def test_gpt_oss_leaks(tmp_path: Path) -> None:
    leak = leak_of(tmp_path / "m", "gpt_oss", "eager", GPT_OSS)
    assert leak > 0.01 and not isolates(leak, low_precision=False) and not isolates(leak, low_precision=True)


def test_rounding_is_no_leak_and_attention_is_one() -> None:
    assert isolates(9e-6, low_precision=False) and not isolates(1e-4, low_precision=False)
    assert isolates(5e-3, low_precision=True) and not isolates(0.02, low_precision=True)
