"""Shared by all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A test that fails half-way must not leave its launchers to disturb the next one."""
    yield
    if "launched" in sys.modules:
        sys.modules["launched"].end_all()
