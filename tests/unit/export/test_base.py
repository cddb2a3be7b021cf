"""Fingerprints of base weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.export import base


def weights(folder: Path, value: float = 0.0, at: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    tensor = torch.zeros(4096)
    tensor[at] = value
    save_file({"a": tensor}, folder / "model.safetensors")
    return str(folder)


def test_the_same_weights_elsewhere_have_the_same_mark(tmp_path: Path) -> None:
    first, second = base.fingerprint(weights(tmp_path / "a")), base.fingerprint(weights(tmp_path / "b"))
    assert first == second and first["files"] == 1 and first["bytes"] > 4 * 4096


@pytest.mark.parametrize("at", [0, 2000, 4095])
def test_one_value_makes_another_mark(tmp_path: Path, at: int) -> None:
    assert base.fingerprint(weights(tmp_path / "a"))["sha256"] != \
        base.fingerprint(weights(tmp_path / "b", 1e-3, at))["sha256"]


def test_of_a_large_file_header_and_spread_blocks_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(base, "BLOCK_BYTES", 64)
    monkeypatch.setattr(base, "BLOCKS", 3)  # of about 16 KiB: at the start, in the middle, at the end
    plain = base.fingerprint(weights(tmp_path / "a"))["sha256"]
    size = (tmp_path / "a" / "model.safetensors").stat().st_size
    middle = ((size - 64) // 2 - (size - 4 * 4096)) // 4 + 4
    assert base.fingerprint(weights(tmp_path / "b", 1.0, middle))["sha256"] != plain
    assert base.fingerprint(weights(tmp_path / "b", 1.0, 4095))["sha256"] != plain
    assert base.fingerprint(weights(tmp_path / "b", 1.0, 1000))["sha256"] == plain  # as the rule says
    save_file({"b": torch.zeros(4096)}, tmp_path / "b" / "model.safetensors")  # same size, another name
    assert base.fingerprint(str(tmp_path / "b"))["sha256"] != plain


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        with pytest.raises(OSError):
            base.fingerprint(str(tmp_path / name))
