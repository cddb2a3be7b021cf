"""Sums, never means: the loss of a micro-batch before it is divided by what the global batch counts.

B rows, T tokens, K kept positions, V vocabulary, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.data.steps.batch import IGNORE, Batch


def sum_cross_entropy(logits_BKV: torch.Tensor, targets_BK: torch.Tensor,
                      weights_BK: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over all targets that are not -100 of weight x cross-entropy in nats, as an fp32 scalar.

    logits [B, K, V] in any float dtype, targets int64 [B, K], weights float32 [B, K] or None when all are 1.
    """
    logits, targets = logits_BKV.flatten(0, 1).float(), targets_BK.flatten()
    if weights_BK is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    each = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    return (each * weights_BK.flatten()).sum()


def sum_router_loss(router_logits: tuple[torch.Tensor, ...], segments_BT: torch.Tensor, *, experts: int,
                    top_k: int) -> torch.Tensor:
    """Sum over examples of tokens x load-balancing loss (Switch Transformer, arXiv:2101.03961, eq. 4-6).

    The loss is a product of two means, so it depends on which tokens are averaged together. Taken per
    example it does not depend on how the batch is split; divided by the global number of tokens the sum is
    the token-weighted mean over examples. For one example it equals transformers' own value, which averages
    over the layers too. router_logits: one [B * T, E] per layer; segments int64 [B, T], -1 is ignored.
    """
    segment_N = segments_BT.flatten()
    live = segment_N >= 0
    count = int(segment_N.max().item()) + 1 if bool(live.any()) else 0
    if count == 0:
        return sum((layer.float().sum() * 0.0 for layer in router_logits), torch.zeros(()))
    index = segment_N[live]
    size_S = torch.zeros(count, device=index.device).index_add_(0, index, torch.ones_like(index, dtype=torch.float))
    chosen_SE = torch.zeros(count, experts, device=index.device)
    prob_SE = torch.zeros(count, experts, device=index.device)
    for layer_NE in router_logits:
        probabilities = layer_NE[live].float().softmax(-1)
        picked = F.one_hot(probabilities.topk(top_k, dim=-1).indices, experts).sum(1).float()
        chosen_SE = chosen_SE.index_add(0, index, picked)
        prob_SE = prob_SE.index_add(0, index, probabilities)
    per_layer_S = size_S * len(router_logits)
    loss_S = experts * (chosen_SE / per_layer_S[:, None] * (prob_SE / per_layer_S[:, None])).sum(-1)
    return (loss_S * size_S).sum()


def router_settings(config: Any) -> tuple[float, int, int] | None:
    """(coefficient, experts, experts per token) of a mixture-of-experts model that is to be balanced, or None."""
    coefficient = getattr(config, "router_aux_loss_coef", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not coefficient or not experts:
        return None
    return float(coefficient), int(experts), int(config.num_experts_per_tok)


def losses(model: torch.nn.Module, batch: Batch, router: tuple[float, int, int] | None
           ) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(summed cross-entropy, summed router loss or None) of a micro-batch, both fp32 scalars."""
    extra = {} if router is None else {"output_router_logits": True}
    output = model(**batch.model_inputs(), **extra)
    cross_entropy = sum_cross_entropy(output.logits, batch.targets, batch.weights)
    if router is None:
        return cross_entropy, None
    return cross_entropy, sum_router_loss(output.router_logits, batch.segments, experts=router[1], top_k=router[2])
