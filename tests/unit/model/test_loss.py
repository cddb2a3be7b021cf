"""Sums over targets, and the experts' balance as a sum over examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dist.given import TINY, save_model
from dist.rows import examples_of
from shardwise.data.steps.batch import IGNORE, make_batch
from shardwise.data.steps.windows import MicroBatch, split
from shardwise.model.loss import losses, router_settings, sum_cross_entropy, sum_router_loss

EXPERTS, TOP_K, LAYERS = 4, 2, 2
MOE = TINY | {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16, "head_dim": 8,
              "router_aux_loss_coef": 0.1, "mlp_only_layers": [], "decoder_sparse_step": 1}
MIXTRAL = TINY | {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "router_aux_loss_coef": 0.02,
                  "sliding_window": None}
ROWS = [([n] * 3 + list(range(n, n + 2 + 3 * n)), [0, 0, 0] + [1] * (2 + 3 * n)) for n in range(1, 6)]


def test_the_sum_over_targets() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, IGNORE, 3], [IGNORE, IGNORE, 6]])
    by_hand = -sum(logits[b, k].log_softmax(-1)[targets[b, k]] for b, k in ((0, 0), (0, 2), (1, 2)))
    assert sum_cross_entropy(logits, targets).item() == pytest.approx(float(by_hand), rel=1e-6)


def test_the_weighted_sum_over_targets() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([[1, IGNORE, 3], [IGNORE, IGNORE, 6]])
    weights = torch.tensor([[0.25, 0.0, 1.0], [0.0, 0.0, 2.0]])
    by_hand = -sum(weights[b, k] * logits[b, k].log_softmax(-1)[targets[b, k]] for b, k in ((0, 0), (0, 2), (1, 2)))
    want, = torch.autograd.grad(by_hand, logits)
    loss = sum_cross_entropy(logits, targets, weights)
    got, = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert torch.allclose(got, want, atol=1e-7) and not got[0, 1].any()


def test_weights_of_one_are_no_weights() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[1, IGNORE, 3, 0, 2], [IGNORE, 5, 6, 6, 6]])
    plain = sum_cross_entropy(logits, targets)
    ones = sum_cross_entropy(logits, targets, (targets != IGNORE).float())
    assert ones.item() == pytest.approx(plain.item(), rel=1e-6)


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(1, 500, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.full((1, 500), 3)
    loss = sum_cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(sum_cross_entropy(logits.float(), targets).item(), rel=1e-6)


def test_no_target_gives_zero_and_no_nan() -> None:
    logits = torch.randn(1, 2, 5, requires_grad=True)
    loss = sum_cross_entropy(logits, torch.full((1, 2), IGNORE))
    loss.backward()
    assert loss.item() == 0.0 and not logits.grad.any()


def router_logits(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, EXPERTS, generator=generator) * 2 for _ in range(LAYERS))


def test_the_balance_of_one_example_is_transformers() -> None:
    logits = router_logits(9)
    want = 9 * load_balancing_loss_func(logits, EXPERTS, TOP_K).item()
    got = sum_router_loss(logits, torch.zeros(1, 9, dtype=torch.long), experts=EXPERTS, top_k=TOP_K)
    assert got.item() == pytest.approx(want, rel=1e-6)


def test_the_balance_is_a_sum_over_examples_whatever_lies_around_them() -> None:
    """Two rows of 6: examples of 4, 2 and 5 tokens, the last position padding."""
    logits = router_logits(12)
    segments = torch.tensor([[0, 0, 0, 0, 1, 1], [2, 2, 2, 2, 2, -1]])
    want = sum(load_balancing_loss_func(tuple(layer[start:end] for layer in logits), EXPERTS, TOP_K).item()
               * (end - start) for start, end in ((0, 4), (4, 6), (6, 11)))
    assert sum_router_loss(logits, segments, experts=EXPERTS, top_k=TOP_K).item() == pytest.approx(want, rel=1e-6)


def test_the_balance_of_a_filler_is_zero_with_gradients() -> None:
    logits = tuple(layer.requires_grad_() for layer in router_logits(2))
    loss = sum_router_loss(logits, torch.full((1, 2), -1), experts=EXPERTS, top_k=TOP_K)
    loss.backward()
    assert loss.item() == 0.0 and all(layer.grad is not None and not layer.grad.any() for layer in logits)


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    fields = MOE if request.param == "qwen3_moe" else MIXTRAL
    folder = save_model(tmp_path_factory.mktemp("loss") / "moe", request.param, **fields)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


def of(model: Any, micros: list[MicroBatch]) -> tuple[float, float, torch.Tensor]:
    """Summed cross-entropy and balance over micro-batches, and the gradient of both together."""
    model.zero_grad()
    cross_entropy = balance = 0.0
    for micro in micros:
        batch = make_batch(micro, examples_of(ROWS), pad_id=0, max_tokens=64)
        loss, router = losses(model, batch, router_settings(model.config))
        (loss + 3.0 * router).backward()
        cross_entropy, balance = cross_entropy + float(loss.detach()), balance + float(router.detach())
    return cross_entropy, balance, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_a_mixture_of_experts_does_not_notice_the_split(model: Any) -> None:
    assert router_settings(model.config) == (model.config.router_aux_loss_coef, EXPERTS, TOP_K)
    one_by_one = of(model, [[[n]] for n in range(len(ROWS))])
    assert one_by_one[1] > 0
    lengths = np.asarray([len(ids) for ids, _ in ROWS], np.int32)
    for packing, limit in ((True, 30), (True, 200), (False, 40), (False, 200)):
        window = split(range(len(ROWS)), lengths, world_size=2, max_tokens=limit, packing=packing)
        got = of(model, [micro for share in window for micro in share])
        assert got[:2] == pytest.approx(one_by_one[:2], rel=1e-5)
        # Gradients go up to 13, of which 1e-5 is less than a rounding of each of the sums they are made of.
        torch.testing.assert_close(got[2], one_by_one[2], rtol=1e-5, atol=1e-5)


def test_one_example_has_the_loss_transformers_computes(model: Any) -> None:
    """For one row whose tokens are all supervised, transformers' own loss with its balance added."""
    ids = torch.tensor([ROWS[3][0]])
    want = model(input_ids=ids, labels=ids, output_router_logits=True)
    batch = make_batch([[0]], examples_of([(ROWS[3][0], [1] * ids.shape[1])]), pad_id=0, max_tokens=64)
    coefficient, *_ = settings = router_settings(model.config)
    cross_entropy, balance = losses(model, batch, settings)
    got = cross_entropy / batch.num_targets + coefficient * balance / batch.tokens
    assert got.item() == pytest.approx(want.loss.item(), rel=1e-5)


def test_a_dense_model_has_no_router(tmp_path: Any) -> None:
    dense = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "tiny", "llama", **TINY))
    assert router_settings(dense.config) is None
    assert losses(dense, make_batch([[0]], examples_of(ROWS), pad_id=0, max_tokens=64), None)[1] is None
