"""What tests start from: small random models, chats, recipes. Imports nothing of the product."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

TOKENIZER = Path(__file__).parents[2] / "recipes" / "tiny" / "tokenizer"
VOCABULARY = 1024
"""Of TOKENIZER."""
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15}
"""Initial weights so wide that attention and positions matter from the first step."""
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
        "initializer_range": 0.15}
"""The model of cases.md."""

Chat = Sequence[dict[str, str]]


def said(count: int) -> str:
    """An answer that grows with `count`."""
    return " ".join(f"word{n}" for n in range(count))


WORDS = (0, 1, 12, 25, 1, 0, 3, 5, 7, 9, 18, 2, 2, 4, 20, 0, 1, 11, 6, 3, 15)
"""Lengths of 21 answers: with their end token 1 to 91 supervised tokens."""
CHATS: list[Chat] = [[{"role": "user", "content": f"hello {n}"}, {"role": "assistant", "content": said(count)}]
                     for n, count in enumerate(WORDS)]
CHATS[3] = [{"role": "system", "content": "Answer briefly."}, *CHATS[3]]
CHATS[9] = [*CHATS[9], {"role": "user", "content": "and then?"}, {"role": "assistant", "content": said(4)}]
LONGEST = 124
"""Tokens of the longest of CHATS."""


def save_model(folder: Path, model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32,
               **fields: Any) -> Path:
    """Random weights as a Hugging Face folder."""
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(dtype).save_pretrained(folder)
    return folder


def tiny_row(length: int, targets: int, seed: int) -> tuple[list[int], list[int]]:
    """Random tokens of TINY, of which the last ones are supervised."""
    ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids, [0] * (length - targets) + [1] * targets


def write_chats(path: Path, chats: Sequence[Chat]) -> Path:
    """A .jsonl file of `messages` rows."""
    path.write_text("".join(json.dumps({"messages": list(chat)}) + "\n" for chat in chats), encoding="utf-8")
    return path


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    """A .jsonl file of `text` rows."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_recipe(path: Path, model: Path, data: Path) -> Path:
    """A recipe in fp32 without tracker; the rest comes as overrides."""
    # Some answers are empty (one supervised token), and some tests evaluate on what they train on: both on purpose.
    path.write_text(f"model: {{path: {model}, tokenizer: {TOKENIZER}}}\ndata: {{train: [{data}], "
                    "on_fault: {empty_turn: report, eval_overlap: report}}\n"
                    "precision: fp32\ntracking: {backends: []}\n", encoding="utf-8")
    return path
