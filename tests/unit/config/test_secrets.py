"""Secrets are hidden wherever they stand; nothing else is touched."""

from __future__ import annotations

import pytest

from shardwise.config.secrets import hide

ENV = {"WANDB_API_KEY": "0123456789abcdef0123", "HF_TOKEN": "hf_aaaaaaaaaaaaaaaaaaaaaaaa",
       "DB_PASSWORD": "open sesame!", "TOKENIZERS_PARALLELISM": "false", "HOME_KEYS": "/tmp", "HOME": "/somewhere/home"}


@pytest.mark.parametrize(("given", "hidden"), [
    ("run.name=0123456789abcdef0123", "run.name=***"),
    ("a open sesame! b", "a *** b"),
    ("other_hf_bbbbbbbbbbbbbbbbbbbbbbbb", "other_***"),
    ("ghp_cccccccccccccccccccc", "***"),
    ("data.train=https://me:secret@host/x.jsonl", "data.train=https://***@host/x.jsonl"),
    ({"x": ["0123456789abcdef0123", 3, None, True], "0123456789abcdef0123": 1.5},
     {"x": ["***", 3, None, True], "***": 1.5})])
def test_secrets_are_hidden(given: object, hidden: object) -> None:
    assert hide(given, ENV) == hidden


@pytest.mark.parametrize("given", [
    "false", "/tmp/run", "/somewhere/home/run", "recipes/tiny.yaml", "https://host/a@b", "HuggingFaceTB/SmolLM2-135M",
    "5d4f3c2b1a0987654321aabbccddeeff00112233", "hf_short", "max_tokens_per_micro_batch=512"])
def test_other_text_stays(given: str) -> None:
    assert hide(given, ENV) == given
