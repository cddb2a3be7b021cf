"""What ranks run for the tests of streamed data and of slow tokenising."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dist.bodies_resume import one_run
from tokenised import small_units, watched


def runs(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train every (name, overrides) of `args["runs"]`, files in pieces of `args["bytes_per_unit"]`."""
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch, args["bytes_per_unit"])
        for name, overrides in args["runs"]:
            run = one_run(overrides)
            results[name] = {key: run[key] for key in ("ended", "start_step", "metrics")}
    return results


def slow_start(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train once, `args["slow"]` seconds for every row that is tokenised; how long it took and what came of it."""
    watched(Path(args["log"]), args["slow"])
    began = time.monotonic()
    run = one_run([*args["overrides"], f"run.output_dir={folder / 'run'}"])
    return {"seconds": time.monotonic() - began, "metrics": run["metrics"], "ended": run["ended"]}
