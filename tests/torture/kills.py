"""One run killed over and over, on changing hardware: its result is that of the run nobody touched.

    PYTHONPATH=src:tests python -m torture.kills [--kills 44] [--steps 240] [--seed 1] [--fixed] [--folder FOLDER]

Every session starts on a random split (ddp, zero1, zero2, zero3 on one or two ranks; with --fixed always zero2 on two)
and ends in a random disaster at a random moment of starting, training or saving: SIGKILL to the launcher, SIGKILL to
one rank, a disk that fills up, or SIGKILL and then a truncated or changed file in the newest checkpoint. At the end the
run is left alone. Fails unless then
- metrics.jsonl holds every step once,
- every step was given the examples that the undisturbed run gave it, and every epoch each example exactly once,
- with --fixed the final weights are equal to the last bit, otherwise as near as those of two undisturbed runs on
  different splits,
- after each disaster nothing was left running, and each loss of a checkpoint was told.
Takes about 15 s per kill on two cores. Results: docs/robustness.md.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from launched import ROOT, environment, mentioning, metrics

HOOKS = Path(__file__).with_name("hooks")
SPLITS = [("ddp", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero2", 1), ("zero3", 1)]
DISASTERS = ["launcher", "rank", "saving", "saving", "disk", "damage"]
GONE_SECONDS = 15.0


class Run:
    """The run under torture, and its launcher."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.output = folder.with_name(folder.name + ".log")
        self.ledger = folder.with_name(folder.name + ".ledger")

    def start(self, strategy: str, ranks: int, **env: str) -> subprocess.Popen[bytes]:
        """`./launch.sh` on a split."""
        words = ["recipes/tiny.yaml", f"run.output_dir={self.folder}", f"strategy={strategy}",
                 f"launch.processes={ranks}", f"schedule.max_steps={self.steps}", "checkpoint.every_steps=2",
                 "checkpoint.keep=3", "data.eval=[]"]
        own = environment(LEDGER=str(self.ledger), **env)
        own["PYTHONPATH"] = f"{HOOKS}{os.pathsep}{own['PYTHONPATH']}"
        self.output.write_bytes(b"")
        with open(self.output, "ab") as log:
            return subprocess.Popen(["./launch.sh", *words], cwd=ROOT, env=own, stdin=subprocess.DEVNULL, stdout=log,
                                    stderr=log, start_new_session=True)

    def whole(self, strategy: str, ranks: int) -> dict[str, torch.Tensor]:
        """To the end; the final weights."""
        code = self.start(strategy, ranks).wait(900)
        assert code == 0, self.said()[-3000:]
        return {name: tensor for file in sorted((self.folder / "final").glob("*.safetensors"))
                for name, tensor in load_file(file).items()}

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def reached(self) -> int:
        """The last step that metrics.jsonl knows; a line half written does not count."""
        try:
            return max((line["step"] for line in metrics(self.folder)), default=0)
        except (OSError, ValueError):
            return -1

    def saving(self, since: float) -> bool:
        """Whether a checkpoint is being written; what a killed session left behind does not count."""
        try:
            return any(path.stat().st_mtime > since for path in (self.folder / "checkpoints").glob("*.part"))
        except FileNotFoundError:  # published between the look and the stat
            return False

    def examples(self) -> dict[int, list[int]]:
        """Step -> the examples it was given when it was last taken."""
        lines = [json.loads(line) for line in self.ledger.read_text().splitlines() if line.endswith("}")]
        return {line["step"]: line["ids"] for line in lines}


def pids(run: Run) -> list[int]:
    """The ranks of a run."""
    return [pid for pid in mentioning(str(run.folder))
            if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes() and
            b"shardwise.train\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def ticks(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.002)


def strike(run: Run, launcher: subprocess.Popen[bytes], disaster: str, chance: random.Random) -> str:
    """Wait for a random moment, then kill; returns when that was."""
    before, began = run.reached(), time.time()
    if disaster != "saving" and chance.random() < 0.2:
        time.sleep(chance.uniform(0.5, 9))
        when = "while starting"
    elif disaster == "saving":
        for _ in ticks(90):
            if launcher.poll() is not None or run.saving(since=began):
                break
        time.sleep(chance.uniform(0, 0.06))
        when = "while saving"
    else:
        further = chance.randint(1, 4)
        for _ in ticks(90):
            if launcher.poll() is not None or run.reached() >= before + further:
                break
        time.sleep(chance.uniform(0, 0.2))
        when = "while training"
    victims = pids(run) if disaster == "rank" or (disaster == "saving" and chance.random() < 0.5) else []
    if victims:
        os.kill(chance.choice(victims), signal.SIGKILL)
        code = launcher.wait(75)
        assert code == 1, f"exit {code} after a rank was killed {when}:\n{run.said()[-2000:]}"
        return f"one of {len(victims)} ranks {when}"
    launcher.kill()
    launcher.wait()
    return f"the launcher {when}"


def nothing_left(run: Run) -> float:
    """Seconds until no process names the run folder."""
    began = time.monotonic()
    while mentioning(str(run.folder)):
        assert time.monotonic() - began < GONE_SECONDS, f"still running: {mentioning(str(run.folder))}"
        time.sleep(0.05)
    return time.monotonic() - began


def damage(run: Run, chance: random.Random) -> bool:
    """Truncate or change a file of the newest checkpoint, where there is one before it."""
    found = sorted((run.folder / "checkpoints").glob("step-????????"))
    if len(found) < 2:
        return False
    file = chance.choice(sorted(path for path in found[-1].rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    if chance.random() < 0.5:
        content = content[:chance.randrange(len(content))]
    else:
        content[chance.randrange(len(content))] ^= 0x55
    file.write_bytes(content)
    return True


def torture(run: Run, kills: int, chance: random.Random, fixed: bool) -> collections.Counter[str]:
    """Sessions until `kills` disasters have struck."""
    struck: collections.Counter[str] = collections.Counter()
    damaged, slowest = False, 0.0
    while struck.total() < kills:
        assert run.reached() < run.steps, f"the run ended after {struck.total()} kills; give it more --steps"
        strategy, ranks = ("zero2", 2) if fixed else chance.choice(SPLITS)
        disaster = chance.choice(DISASTERS)
        full = {"DISK_FULL": f"{chance.randrange(ranks)}:{chance.randrange(1, 60_000)}"} if disaster == "disk" else {}
        began = time.monotonic()
        launcher = run.start(strategy, ranks, **full)
        if disaster == "disk":
            code = launcher.wait(120)
            assert code == 1 and "could not be written" in run.said(), f"exit {code}:\n{run.said()[-2000:]}"
            assert "training goes on, and stops if" in run.said() and "Traceback" not in run.said(), run.said()[-3000:]
            what = "a full disk while saving"
        else:
            what = strike(run, launcher, disaster, chance)
        if damaged and "going on after step" in run.said():
            assert "is broken and left aside" in run.said(), run.said()[-3000:]
        damaged = damaged and "is broken and left aside" not in run.said()
        slowest = max(slowest, nothing_left(run))
        if disaster == "damage" and damage(run, chance):
            damaged, what = True, what + ", then a damaged checkpoint"
        struck[what] += 1
        print(f"{struck.total():3d}  {strategy} x{ranks}, {time.monotonic() - began:4.1f} s, step {run.reached():3d}: "
              f"{what}", flush=True)
    print(f"nothing was left running {slowest:.1f} s after any of them")
    return struck


def check(run: Run, reference: Run, steps: int) -> int:
    """Steps and examples of both; returns the number of whole epochs."""
    assert [line["step"] for line in metrics(run.folder)] == list(range(1, steps + 1))
    seen, expected = run.examples(), reference.examples()
    assert seen == expected and sorted(seen) == list(range(steps))
    per_epoch = sum(line["epoch"] <= 1 for line in metrics(reference.folder))
    everything = sorted({i for ids in expected.values() for i in ids})
    for epoch in range(steps // per_epoch):
        given = sorted(i for step in range(epoch * per_epoch, (epoch + 1) * per_epoch) for i in seen[step])
        assert given == everything, f"epoch {epoch} did not see every example exactly once"
    return steps // per_epoch


def furthest(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert some.keys() == other.keys()
    return max((some[name] - other[name]).abs().max().item() for name in some)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=44)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    words = parser.parse_args()
    folder = words.folder or Path(tempfile.mkdtemp(prefix="torture-"))
    reference, again, run = (Run(folder / name, words.steps) for name in ("reference", "again", "run"))
    folder.mkdir(parents=True, exist_ok=True)
    expected = reference.whole(*(("zero2", 2) if words.fixed else ("ddp", 1)))
    floor = 0.0 if words.fixed else furthest(again.whole("zero2", 2), expected)
    struck = torture(run, words.kills, random.Random(words.seed), words.fixed)
    final = run.whole(*(("zero2", 2) if words.fixed else ("zero3", 2)))
    epochs = check(run, reference, words.steps)
    difference = furthest(final, expected)
    print(json.dumps(dict(struck.most_common()), indent=2))
    print(f"{struck.total()} kills in {words.steps} steps; {epochs} epochs, each example once in each; largest "
          f"difference of a weight from the undisturbed run {difference:.1e} (two undisturbed ones on other splits: "
          f"{floor:.1e})")
    assert difference <= 4 * floor, "the weights are further away than another split would make them"


if __name__ == "__main__":
    main()
