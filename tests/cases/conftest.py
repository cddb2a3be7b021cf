"""Fixtures of the cases."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from cases import sft


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sft.Checked:
    """Rows -> the report of `data check`, and the examples left."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    return partial(sft.checked, tmp_path)
