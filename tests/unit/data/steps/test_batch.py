"""Rows of examples as tensors: targets, borders, positions, padding, filler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dist.given import TINY, save_model
from dist.rows import examples_of
from shardwise.data.steps.batch import IGNORE, Batch, make_batch
from shardwise.data.steps.windows import MicroBatch, computed_tokens, split
from shardwise.model.loss import losses

CHAT = ([11, 12, 13, 14], [0, 0, 1, 1])
TEXT = ([21, 22, 23], [1, 1, 1])
ROWS = [CHAT, TEXT]
LIMIT = 64
NONE = [IGNORE]


def batch_of(micro: MicroBatch) -> Batch:
    return make_batch(micro, examples_of(ROWS), pad_id=9, max_tokens=LIMIT)


def test_a_target_is_the_token_after() -> None:
    batch = batch_of([[0]])
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 9, 9, 9, 9]]  # eight, so that few shapes occur
    assert batch.keep.tolist() == [1, 2, 0, 0, 0, 0, 0, 0] and batch.targets.tolist() == [[13, 14] + 6 * NONE]
    assert batch.attention_mask is None
    assert (batch.tokens, batch.num_targets, batch.target_weight, batch.weights) == (4, 2, 2.0, None)


def test_b30_packed_examples_have_a_border() -> None:
    """Lengths 4 and 3, every token live: 3 + 2 = 5 targets; the last token of the first predicts nothing."""
    batch = make_batch([[0, 1]], examples_of([(CHAT[0], [1] * 4), TEXT]), pad_id=9, max_tokens=LIMIT)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]  # what is added is a segment of its own
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1, -1]]
    assert batch.keep.tolist() == [0, 1, 2, 4, 5, 0, 0, 0]
    assert batch.targets.tolist() == [[12, 13, 14, 22, 23] + 3 * NONE]
    assert (batch.tokens, batch.num_targets) == (7, 5)
    assert batch.attention_mask is None


def test_padded_rows() -> None:
    batch = batch_of([[0], [1]])
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 9, 9, 9, 9], [21, 22, 23, 9, 9, 9, 9, 9]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 0, -1, -1, -1, -1], [1, 1, 1, -1, -1, -1, -1, -1]]
    # Positions any row needs; where another row has no target there it is ignored.
    assert batch.keep.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert batch.targets.tolist() == [[IGNORE, 13, 14] + 5 * NONE, [22, 23, IGNORE] + 5 * NONE]
    assert (batch.tokens, batch.num_targets) == (7, 4)


def test_targets_have_weights() -> None:
    """The first token's is never used, 0 is no target, padding of `keep` has none."""
    rows = [([11, 12, 13, 14], [9, 0.25, 0, 2]), ([21, 22], [0, 1])]
    packed, padded = (make_batch(micro, examples_of(rows), pad_id=9, max_tokens=LIMIT)
                      for micro in ([[0, 1]], [[0], [1]]))
    assert packed.keep.tolist() == [0, 2, 4, 0, 0, 0, 0, 0]
    assert packed.targets.tolist() == [[12, 14, 22] + 5 * NONE]
    assert packed.weights is not None and packed.weights.dtype == torch.float32
    assert packed.weights.tolist() == [[0.25, 2.0, 1.0, 0, 0, 0, 0, 0]]
    assert (packed.num_targets, packed.target_weight) == (3, 3.25)
    assert padded.weights is not None and padded.keep.tolist()[:2] == [0, 2]
    assert padded.targets.tolist() == [[12, 14] + 6 * NONE, [22] + 7 * NONE]
    assert padded.weights.tolist() == [[0.25, 2.0, 0, 0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0, 0, 0, 0]]
    assert (padded.num_targets, padded.target_weight) == (3, 3.25)
    assert make_batch([[1]], examples_of(rows), pad_id=9, max_tokens=LIMIT).weights is None


@pytest.mark.parametrize("packing", [True, False])
def test_computed_tokens_are_those_of_the_batches(packing: bool) -> None:
    examples = examples_of([(list(range(n)), [1] * n) for n in (3, 50, 17, 41, 9)])
    window = split(range(5), examples.lengths, world_size=4, max_tokens=LIMIT, packing=packing)
    window[3].append([])  # a filler row is computed too
    batches = [make_batch(micro, examples, pad_id=9, max_tokens=LIMIT) for share in window for micro in share]
    computed = computed_tokens(window, examples.lengths, max_tokens=LIMIT)
    assert computed == sum(batch.input_ids.numel() for batch in batches) > sum(batch.tokens for batch in batches)


@pytest.mark.parametrize(("micro", "limit", "width"), [([[0]], 4, 4), ([[0]], 5, 5), ([[0], [1]], 8, 4),
                                                       ([[0], [1]], 11, 5), ([[0, 1]], 7, 7), ([[0, 1]], 100, 8)])
def test_rounding_up_stays_within_the_limit(micro: MicroBatch, limit: int, width: int) -> None:
    batch = make_batch(micro, examples_of(ROWS), pad_id=9, max_tokens=limit)
    assert batch.input_ids.shape == (len(micro), width)


def test_a_filler_adds_nothing_but_takes_part() -> None:
    batch = batch_of([])
    assert (batch.tokens, batch.num_targets, batch.target_weight, batch.weights) == (0, 0, 0.0, None)
    assert batch.targets.tolist() == [[IGNORE]] and len(batch.keep) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder: Path = save_model(tmp_path_factory.mktemp("batch") / "tiny", "llama", **TINY)
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    return loaded


def summed(model: torch.nn.Module, micro: MicroBatch) -> tuple[float, torch.Tensor]:
    """Cross-entropy sum, and the gradient of every weight in one vector."""
    model.zero_grad()
    loss, _ = losses(model, batch_of(micro), None)
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("micro", [[[0, 1]], [[0], [1]]], ids=["packed", "padded"])
def test_b30_together_is_the_sum_of_apart(micro: MicroBatch, model: torch.nn.Module) -> None:
    apart = [summed(model, [[n]]) for n in (0, 1)]
    loss, gradient = summed(model, micro)
    assert loss == pytest.approx(apart[0][0] + apart[1][0], rel=1e-6)
    assert gradient == pytest.approx(apart[0][1] + apart[1][1], abs=1e-6)


def test_a_filler_changes_no_gradient(model: torch.nn.Module) -> None:
    loss, gradient = summed(model, [])
    assert loss == 0.0 and not gradient.any()
