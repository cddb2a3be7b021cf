"""The same training a second time, as plainly as it can be written: one process, one big batch per step.

Shares no line with the product: this file imports nothing from it (test_every_split.py asserts that). It takes
initial weights (a Hugging Face folder) and rows (token ids and loss weights), and returns what every step
did. Chats are rendered and tokenised by hand, the order is drawn by the documented rule, rows are padded on the
right under an attention mask, all logits are computed, and attention is eager.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

Row = tuple[list[int], Sequence[float]]
"""(token ids, 1 where the token is to be predicted, or another weight of its loss)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Numbers of a run; nothing about hardware."""

    examples_per_step: int
    epochs: int = 2
    seed: int = 0
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    max_grad_norm: float | None = 1.0
    kind: str = "cosine"
    warmup_steps: int = 0
    held_out: int = 0
    """The first so many rows are scored before and after training."""


@dataclass
class Result:
    """One entry per optimizer step, and the weights after the last one."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    supervised_tokens: list[int] = field(default_factory=list)
    eval_loss: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Before clipping."""


def chat_row(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> Row:
    """ChatML by hand. Each piece is tokenised alone: what the model has to write starts a token of its own."""
    ids: list[int] = []
    supervised: list[int] = []
    for message in messages:
        own = message["role"] == "assistant"
        for piece, flag in ((f"<|im_start|>{message['role']}\n", 0), (f"{message['content']}<|im_end|>", int(own)),
                            ("\n", 0)):
            part = tokenizer.encode(piece, add_special_tokens=False).ids
            ids += part
            supervised += [flag] * len(part)
    return ids, supervised


def text_rows(tokenizer: Tokenizer, texts: Sequence[str], *, block: int, end: int) -> list[Row]:
    """Documents, each closed by its end token, as one stream cut into blocks; all tokens supervised."""
    stream = [token for text in texts for token in [*tokenizer.encode(text).ids, end]]
    cut = [stream[at:at + block] for at in range(0, len(stream), block)]
    return [(ids, [1] * len(ids)) for ids in cut if len(ids) > 1]


def batches(count: int, settings: Settings) -> list[list[int]]:
    """Row numbers of every optimizer step: a PCG64 permutation seeded by [seed, epoch], cut in order."""
    size = settings.examples_per_step
    steps = []
    for epoch in range(settings.epochs):
        order = np.random.Generator(np.random.PCG64([settings.seed, epoch])).permutation(count).tolist()
        steps += [order[at:at + size] for at in range(0, count, size)]
    return steps


def learning_rates(steps: int, settings: Settings) -> list[float]:
    """A rise over `warmup_steps` that reaches the peak right after, then the decay towards zero."""
    warmup = settings.warmup_steps
    rates = []
    for step in range(steps):
        share = (step - warmup) / max(1, steps - warmup)
        shape = {"constant": 1.0, "linear": 1.0 - share, "cosine": (1.0 + math.cos(math.pi * share)) / 2.0}
        rates.append(settings.lr * ((step + 1) / (warmup + 1) if step < warmup else shape[settings.kind]))
    return rates


def padded(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids and attention mask [B, T], and the loss weights [B, T - 1] of all ids but the first."""
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.long)
    weights_BT = torch.zeros(len(rows), width)
    for r, (ids, weights) in enumerate(rows):
        ids_BT[r, :len(ids)] = torch.tensor(ids)
        mask_BT[r, :len(ids)] = 1
        weights_BT[r, :len(ids)] = torch.tensor(weights)
    return ids_BT, mask_BT, weights_BT[:, 1:]


def loss_of(model: torch.nn.Module, rows: Sequence[Row]) -> tuple[torch.Tensor, int]:
    """Weighted mean cross-entropy over all supervised targets of the batch, and their count."""
    ids_BT, mask_BT, weights = padded(rows)
    logits = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits[:, :-1].float()
    each = -logits.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    return (each * weights).sum() / weights.sum(), int((weights > 0).sum())


def balance_of(model: torch.nn.Module, rows: Sequence[Row]) -> torch.Tensor | float:
    """The experts' load-balancing loss x its coefficient: transformers' value per row, weighted by tokens."""
    config = model.config
    if not getattr(config, "num_experts", None):
        return 0.0
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    total, tokens = 0.0, sum(len(ids) for ids, _ in rows)
    for ids, _ in rows:
        router = model(input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False).router_logits
        total += load_balancing_loss_func(router, config.num_experts, config.num_experts_per_tok) * len(ids)
    return config.router_aux_loss_coef * total / tokens


def score(model: torch.nn.Module, rows: Sequence[Row], result: Result) -> None:
    """Write down the loss of held-out rows, if there are any."""
    if rows:
        with torch.no_grad():
            result.eval_loss.append(loss_of(model, rows)[0].item())


def make_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Weight decay on matrices, none on vectors."""
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def train(model_folder: Path, rows: Sequence[Row], settings: Settings) -> Result:
    """Train in fp32 from the weights in a folder."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    model.train()
    optimizer = make_optimizer(model, settings)
    result = Result()
    steps = batches(len(rows), settings)
    score(model, rows[:settings.held_out], result)
    for chosen, lr in zip(steps, learning_rates(len(steps), settings), strict=True):
        loss, count = loss_of(model, [rows[i] for i in chosen])
        (loss + balance_of(model, [rows[i] for i in chosen])).backward()
        result.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
        norm = math.sqrt(squares)
        if settings.max_grad_norm is not None and norm > settings.max_grad_norm:
            for parameter in model.parameters():
                parameter.grad.mul_(settings.max_grad_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        result.loss.append(float(loss.detach()))
        result.grad_norm.append(norm)
        result.lr.append(lr)
        result.supervised_tokens.append(count)
    score(model, rows[:settings.held_out], result)
    result.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def deviations(steps: Mapping[str, Sequence[float]], weights: Mapping[str, torch.Tensor], want: Result
               ) -> dict[str, float]:
    """The worst of: loss and gradient norm of any step (relative), evaluations, any weight at the end (absolute)."""
    off = {key: max((abs(a - b) / abs(b) for a, b in zip(steps[key], getattr(want, key), strict=True)), default=0.0)
           for key in ("loss", "grad_norm", "eval_loss")}
    missing = want.weights.keys() - weights.keys()
    # A tied weight has two names in a whole state dict and one among the parameters.
    assert not missing, f"not among the weights: {sorted(missing)[:3]}"
    off["weights"] = max(float((weights[name].float() - value).abs().max()) for name, value in want.weights.items())
    return off
