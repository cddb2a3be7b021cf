"""SIGTERM to one of two ranks at random moments, again and again over one run. Prints its figures.

    PYTHONPATH=src:tests python -m torture.stops [TIMES] [SEED]

Every time: both ranks end by themselves after the same step, the checkpoint of that step is complete, the launcher
leaves with 3 in less than 30 s and nothing is left running. About a fifth of the signals meet the set-up, where there
is nothing new to save.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launched import finish, mentioning, start

WORDS = ["recipes/tiny.yaml", "batch.examples_per_step=4", "schedule.epochs=null", "schedule.max_steps=100000",
         "checkpoint.every_steps=7", "eval.every_steps=5", "launch.processes=2"]
SECONDS = 30.0
SET_UP_SHARE = 0.2


class Seen:
    """What the ranks of one start wrote about themselves; the launcher removes it, so it is read as it comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: dict[int, dict[str, Any]] = {}

    def look(self) -> dict[int, dict[str, Any]]:
        """The newest words of each rank."""
        for path in self.folder.glob("shardwise-*/rank-*.json"):
            try:
                found = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            self.ranks[found["rank"]] = found
        return self.ranks


def strike(run: Path, scratch: Path, dice: random.Random, *, strategy: str) -> dict[str, Any]:
    """Start or go on, signal one rank at a random moment, and see what came of it. Raises AssertionError."""
    scratch.mkdir(parents=True)
    seen = Seen(scratch)
    process = start("./launch.sh", *WORDS, f"strategy={strategy}", f"run.output_dir={run}", TMPDIR=str(scratch))
    in_setup = dice.random() < SET_UP_SHARE
    lines = run / "metrics.jsonl"
    began, size = time.monotonic(), lines.stat().st_size if lines.exists() else 0
    # metrics.jsonl is written anew at the end of the set-up, then grows.
    started = lines.stat().st_mtime_ns if lines.exists() else 0
    while len(seen.look()) < 2 or not (in_setup or (lines.exists() and lines.stat().st_mtime_ns != started)):
        assert process.poll() is None and time.monotonic() - began < 120, f"never got going ({size})"
        time.sleep(0.02)
    time.sleep(dice.uniform(0, 5))
    rank = dice.randrange(2)
    struck = time.monotonic()
    os.kill(seen.look()[rank]["pid"], signal.SIGTERM)
    while process.poll() is None and time.monotonic() - struck < 2 * SECONDS:
        seen.look()
        time.sleep(0.01)
    took = time.monotonic() - struck
    code, output = finish(process, 10)
    tail = output[-2000:]
    assert code == 3, f"exit code {code}\n{tail}"
    assert took < SECONDS, f"{took:.1f} s\n{tail}"
    assert mentioning(str(run)) == [], "processes are left"
    words = output.strip().splitlines()[-1]
    steps = {found["step"] for found in seen.ranks.values()}
    kinds = {found["kind"] for found in seen.ranks.values()}
    if "before the first step" in words:
        assert steps == {None}, seen.ranks
        return {"rank": rank, "seconds": took, "step": None}
    assert kinds == {"stopped"} and len(steps) == 1 and None not in steps, seen.ranks
    [step] = steps
    newest = max((run / "checkpoints").glob("step-*[0-9]"))
    meta = json.loads((newest / "meta.json").read_text())
    assert newest.name == f"step-{step:08d}" and meta["step"] == step, f"{newest} after step {step}"
    logged = [json.loads(line)["step"] for line in lines.read_text().splitlines() if '"grad_norm"' in line]
    assert logged == list(range(1, step + 1)), f"steps {logged[-5:]} were logged, not up to {step}"
    return {"rank": rank, "seconds": took, "step": step}


def main() -> int:
    """The long form."""
    times, seed = (int(word) for word in [*sys.argv[1:], "20", "0"][:2]) if len(sys.argv) != 2 else (
        int(sys.argv[1]), 0)
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        done = []
        for number in range(times):
            strategy = ("ddp", "zero2")[number * 2 // times]
            done.append(strike(Path(folder) / strategy, Path(folder) / f"tmp-{number}", dice, strategy=strategy))
            print(f"{number + 1}: {strategy}, SIGTERM to rank {done[-1]['rank']}, ended together "
                  + ("in the set-up" if done[-1]["step"] is None else f"after step {done[-1]['step']}")
                  + f", {done[-1]['seconds']:.1f} s", flush=True)
    seconds = [one["seconds"] for one in done]
    print(f"{times} signals ({sum(one['step'] is None for one in done)} during set-up): same step on both ranks, a "
          f"complete checkpoint, exit code 3, no process left; {statistics.median(seconds):.1f} s in the median, "
          f"{max(seconds):.1f} s at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
