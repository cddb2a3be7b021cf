"""Scores and samples on held-out data: sums over all targets, divided once."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from shardwise.dist import sum_over_ranks
from shardwise.model.loss import losses
from shardwise.train import heartbeat
from shardwise.train.agreement import StopAsked
from shardwise.train.parts import Parts

log = logging.getLogger("shardwise")


class Score(NamedTuple):
    """What held-out data says of the weights."""

    line: dict[str, Any] | None
    """For metrics.jsonl; None without held-out data."""
    samples: list[dict[str, Any]]


def score_held_out(parts: Parts, step: int) -> Score | None:
    """Evaluate and answer samples; None on every rank when one of them was asked to stop meanwhile."""
    asked = StopAsked(parts.stop, parts.device)
    heartbeat.phase("evaluating")
    line, complete = evaluate(parts, step, asked)
    if not complete:
        return None
    heartbeat.phase("answering samples")
    written = samples(parts, step, asked)
    return None if written is None else Score(line, written)


def evaluate(parts: Parts, step: int, asked: StopAsked) -> tuple[dict[str, Any] | None, bool]:
    """Weighted mean cross-entropy over the targets of the whole held-out set, and whether it came to its end.

    Runs on every rank; None without held-out data, and when a rank was asked to stop.
    """
    examples = parts.held_out
    if examples is None:
        return None, True
    window = parts.window(examples, list(range(len(examples))))
    total = torch.zeros(1, dtype=torch.float64, device=parts.device)
    stopped = False
    parts.engine.model.eval()
    with torch.no_grad():
        for batch in tqdm(parts.batches(examples, window), total=len(window[parts.ranks.rank]), desc="evaluating",
                          delay=2, leave=False, dynamic_ncols=True, disable=not parts.ranks.main):
            with parts.autocast():
                total += losses(parts.engine.model, batch, None)[0]
            heartbeat.tick()
            stopped = asked()
            if stopped:
                break
    parts.engine.model.train()
    if stopped:
        return None, False
    loss = sum_over_ranks(total).item() / float(examples.target_weight.sum())
    return {"step": step, "eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0)),
            "eval_tokens": int(examples.supervised.sum(dtype=np.int64))}, True


def samples(parts: Parts, step: int, asked: StopAsked) -> list[dict[str, Any]] | None:
    """Greedy replies to the first held-out conversations, beside what was said there.

    Runs on every rank; None on all when one of them was asked to stop.
    """
    config = parts.resolved.config.eval
    examples = parts.held_out
    written = []
    for index in range(min(config.generate_samples, 0 if examples is None else len(examples))):
        assert examples is not None
        ids, weights = examples.get([index])[0]
        supervised = weights > 0
        first = int(np.flatnonzero(supervised)[0])
        stop = first + int(np.argmin(np.append(supervised[first:], False)))
        reply = generate(parts, ids[:first].tolist(), end=int(ids[stop - 1]))
        if asked.now():
            return None
        written.append({"step": step, "prompt": parts.tokenizer.decode(ids[:first]), "reply": reply,
                        "held_out": parts.tokenizer.decode(ids[first:stop], skip_special_tokens=True)})
    return written


def generate(parts: Parts, prompt: list[int], *, end: int) -> str:
    """A greedy reply to prompt ids, ended by the token that ends an assistant's turn."""
    module: Any = parts.engine.module
    zero3 = parts.resolved.strategy == "zero3"
    inputs = torch.tensor([prompt], device=parts.device)
    module.eval()
    with torch.no_grad(), parts.autocast():
        output = module.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                                 max_new_tokens=parts.resolved.config.eval.max_new_tokens, eos_token_id=end,
                                 pad_token_id=parts.pad_id, synced_gpus=zero3, temperature=None, top_p=None,
                                 top_k=None, stopping_criteria=[functools.partial(_cut_short, parts)])
    module.train()
    text: str = parts.tokenizer.decode(output[0, len(prompt):], skip_special_tokens=True)
    return text


def _cut_short(parts: Parts, ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
    """After each token: this rank's wish to stop ends its reply, which is then thrown away by all."""
    heartbeat.tick()
    return torch.full((ids.shape[0],), parts.stop.wanted(), device=ids.device, dtype=torch.bool)
