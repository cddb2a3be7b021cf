"""The short form of tests/torture/kills.py: three disasters to one run on two ranks, and its result to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

from torture.kills import Run, check, furthest, torture

STEPS, KILLS = 36, 3


def test_a_run_that_is_killed_comes_to_the_same_end(tmp_path: Path) -> None:
    reference, run = Run(tmp_path / "reference", STEPS), Run(tmp_path / "run", STEPS)
    expected = reference.whole("zero2", 2)
    torture(run, KILLS, random.Random(3), fixed=True)
    final = run.whole("zero2", 2)
    assert check(run, reference, STEPS) == 2  # whole epochs, each with every example once
    assert furthest(final, expected) == 0.0
