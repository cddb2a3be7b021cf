"""Run folders as training leaves them, made in a second: a model, trained weights of its own, a checkpoint."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist.given import CHATS, LLAMA, TOKENIZER, VOCABULARY, save_model, write_chats, write_recipe
from saved import save_checkpoint
from shardwise.config.load import load
from shardwise.config.resolve import as_tree
from shardwise.export import skeleton
from shardwise.export.base import fingerprint
from shardwise.model.adapters import add_adapter

IDS = [5, 900, 33, 7, 260, 12]
PROMPT = torch.tensor([IDS])


@dataclass
class Made:
    """A run folder and the live model behind it."""

    folder: Path
    base: Path
    live: Any
    checkpoint: Path

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """Trained weights by name, in fp32."""
        return {name: p.detach() for name, p in self.live.named_parameters() if p.requires_grad}

    def logits(self) -> torch.Tensor:
        """Of the live model after PROMPT, [vocabulary]."""
        return logits_of(self.live)


def logits_of(model: Any) -> torch.Tensor:
    """fp32 logits after PROMPT, [vocabulary]."""
    model.eval()
    with torch.no_grad():
        return model(input_ids=PROMPT, use_cache=False).logits[0, -1].float()


def make_run(folder: Path, *settings: str, tied: bool = True, model_type: str = "llama", ranks: int = 2,
             strategy: str = "zero3", base_dtype: torch.dtype = torch.float32, **fields: Any) -> Made:
    """A run of these settings that moved every trained weight a little, saved after step 4."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = save_model(folder / "base", model_type, dtype=base_dtype, vocab_size=VOCABULARY,
                      tie_word_embeddings=tied, **(fields or LLAMA))
    recipe = write_recipe(folder / "recipe.yaml", base, write_chats(folder / "chats.jsonl", CHATS))
    run = folder / "run"
    config = load(recipe, [f"run.output_dir={run}", *settings]).config
    live = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, about ties
        live = add_adapter(live, config.adapter)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(1)
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=noise)
    run.mkdir()
    skeleton.save(run / "skeleton", live, AutoTokenizer.from_pretrained(TOKENIZER), chat_template=None, check_ids=IDS)
    counts = {"rows": 21, "examples": 21, "tokens": 900, "supervised_tokens": 300, "dropped": {}}
    (run / "manifest.json").write_text(json.dumps({
        "config": as_tree(config), "identity": {"strategy": strategy, "offload": "none", "world_size": ranks},
        "cwd": str(folder), "command": ["recipe.yaml"], "git": None, "python": "3.11", "packages": {"shardwise": "0"},
        "data": {"train": counts, "train_sources": [{"name": "chats.jsonl", "rows": 21, "fingerprint": "abc"}],
                 "eval": None, "eval_sources": []},
        "base": {"path": str(base), **fingerprint(str(base))}}))
    (run / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "loss": 7 - step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100,
                    "supervised_tokens": 50}) + "\n"
        for step in range(1, 5)))
    made = Made(folder=run, base=base, live=live, checkpoint=run / "checkpoints")
    made.checkpoint = save_checkpoint(run / "checkpoints", 4, made.trained, ranks=ranks, strategy=strategy)
    return made
