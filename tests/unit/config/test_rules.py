"""Contradictions between settings: each refused with its place and a way out, none silently mended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.config.load import load
from shardwise.errors import ConfigError

BASE = "model: {path: a}\ndata: {train: [a.jsonl]}\n"


@pytest.mark.parametrize(("words", "said"), [
    ("model.path=null", "model.path is not set"),
    ("model.from_config={model_type: llama} model.path=a", "both set"),
    ("model.path=null model.from_config={hidden_size: 4} model.tokenizer=t", "needs a model_type"),
    ("model.path=null model.from_config={model_type: llama}", "model.tokenizer is not set"),
    ("model.path=null model.from_config={model_type: llama} model.tokenizer=t adapter.kind=lora", "freeze"),
    ("model.dtype=bf16", "use dtype auto"),
    ("model.dtype=bf16 adapter.kind=lora precision=fp32", "precision=fp32"),
    ("data.train=[]", "data.train is empty"),
    ("data.task=pretrain batch.max_tokens_per_micro_batch=8", "less than one block"),
    ("data.task=pretrain data.max_length=1", "at least 2"),
    ("data.task=pretrain data.chat_template=t.jinja", "no meaning"),
    ("data.task=pretrain data.supervise=last", "no meaning"),
    ("eval.every_steps=5", "data.eval is empty"), ("eval.generate_samples=1", "held-out chats"),
    ("schedule.epochs=1 schedule.max_steps=1", "both set"),
    ("schedule.warmup_ratio=0.1 schedule.warmup_steps=1", "both set"),
    ("schedule.warmup_steps=5 schedule.max_steps=4", "never be reached"),
    ("schedule.kind=wsd schedule.warmup_ratio=0.9", "overlap"), ("optim.momentum=0.9", "belongs to sgd"),
    ("offload=optimizer strategy=ddp", "zero1, zero2 or zero3"),
    ("offload=params strategy=zero2", "strategy=zero3"),
    ("model.attention=flash_attention_2 precision=fp32", "bf16 and fp16 only")])
def test_contradictions(tmp_path: Path, words: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(BASE)
    split = re.split(r" (?=[a-z_.]+=)", words)
    with pytest.raises(ConfigError) as caught:
        load(path, split)
    assert any(said in fault for fault in caught.value.faults), caught.value.faults
    assert all(fault.startswith((f"{path}:", "command line", "default")) for fault in caught.value.faults)


def test_the_plain_recipe_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(BASE)
    load(path)
