"""The limit of a micro-batch after memory ran out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dist.rows import examples_of
from shardwise.errors import TrainingError
from shardwise.outcome import MICRO_BATCH as FILE
from shardwise.train.memory import MicroBatchLimit, is_out_of_memory

ROWS = examples_of([([1] * length, [0] + [1] * (length - 1)) for length in (30, 7, 50)])


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to "
                 "allocate 8 bytes."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried to"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")])
def test_running_out_is_recognised(error: RuntimeError) -> None:
    assert is_out_of_memory(error)


def test_the_real_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
                                   RuntimeError("Connection closed by peer"), ValueError("out of memory")])
def test_other_failures_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_it_halves_down_to_the_longest_example_of_the_step(tmp_path: Path) -> None:
    limit = MicroBatchLimit(200, folder=tmp_path)
    for want in (100, 50):
        limit.halve(ROWS, [0, 1, 2], step=9)
        assert limit.tokens == limit.of(ROWS, [0, 1, 2]) == want
    limit.halve(ROWS, [0, 1], step=10)
    assert limit.tokens == 25
    # Never less than the longest of the examples in question.
    assert limit.of(ROWS, [0, 1]) == 30 and limit.of(ROWS, [2]) == 50


def test_an_example_that_does_not_fit_alone_is_named(tmp_path: Path) -> None:
    limit = MicroBatchLimit(50, folder=tmp_path)
    with pytest.raises(TrainingError) as caught:
        limit.halve(ROWS, [1, 2, 0], step=9)
    assert str(caught.value).startswith("step 9: rows:3 has 50 tokens and does not fit into memory even alone")
    for way in ("strategy=zero3", "offload=optimizer", "gradient_checkpointing=true", "data.max_length"):
        assert way in str(caught.value)


def test_a_later_session_starts_with_what_was_found(tmp_path: Path) -> None:
    limit = MicroBatchLimit(200, folder=tmp_path / "run")
    assert not limit.path.exists()
    limit.halve(ROWS, [0], step=1)
    limit.remember()
    assert json.loads((tmp_path / "run" / FILE).read_text()) == {"asked": 200, "max_tokens_per_micro_batch": 100}
    assert MicroBatchLimit(200, folder=tmp_path / "run").tokens == 100
    # Whoever asks for another limit is given that one.
    assert MicroBatchLimit(300, folder=tmp_path / "run").tokens == 300


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"asked": 200}',
                                     '{"asked": 200, "max_tokens_per_micro_batch": "x"}'])
def test_a_file_that_says_nothing_is_ignored(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    assert MicroBatchLimit(200, folder=tmp_path).tokens == 200


def test_where_the_process_cannot_go_on_the_next_one_is_told(tmp_path: Path) -> None:
    limit = MicroBatchLimit(200, folder=tmp_path)
    error = limit.start_again(ROWS, [0, 1], step=4)
    assert str(error).startswith("out of memory in step 4 with micro-batches of up to 200 tokens")
    assert error.exit_code == 1 and "A new start goes on from the last checkpoint with 100" in str(error)
    assert MicroBatchLimit(200, folder=tmp_path).tokens == 100
    with pytest.raises(TrainingError, match="does not fit into memory even alone"):
        MicroBatchLimit(30, folder=tmp_path).start_again(ROWS, [0, 1], step=4)
