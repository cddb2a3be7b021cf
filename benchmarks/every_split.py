"""`./launch.sh recipes/tiny.yaml` on every split, from the command line: is metrics.jsonl the same?

    ./.venv/bin/python benchmarks/every_split.py [--steps 8] [--json FILE]

Every strategy (with and without offload) x 1 and 2 processes x 3 micro-batches x packed and padded, fp32. Each run's
loss, gradient norm and learning rate of every step are compared with those of one ddp process with one
micro-batch. Exits 1 when one is further off than 1e-5 relative (1e-4 where DeepSpeed's CPU Adam makes the step).
Takes about 12 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STRATEGIES = (("ddp", "none"), ("zero1", "none"), ("zero2", "none"), ("zero3", "none"), ("zero3", "params"))
MICRO_BATCHES = (512, 700, 4096)
KEYS = ("loss", "grad_norm", "lr")


def run(folder: Path, steps: int, *settings: str) -> list[dict[str, float]]:
    """Training lines of one run from the command line."""
    words = ["./launch.sh", "recipes/tiny.yaml", *settings, f"schedule.max_steps={steps}", "precision=fp32",
             "data.eval=[]", f"run.output_dir={folder}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(words)}\nexit {done.returncode}\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def deviation(ours: list[dict[str, float]], reference: list[dict[str, float]]) -> float:
    """Largest relative difference of any figure of any step; infinite when steps or counts differ."""
    if [r["supervised_tokens"] for r in ours] != [r["supervised_tokens"] for r in reference]:
        return float("inf")
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, reference, strict=True) for key in KEYS)


def main() -> None:
    """Run and compare all splits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        reference = run(Path(name) / "reference", args.steps, "strategy=ddp", "launch.processes=1",
                        "batch.max_tokens_per_micro_batch=8192")
        assert all(line["micro_batches"] == 1 for line in reference)

        def compared(number: int, split: tuple[tuple[str, str], int, int, bool]) -> dict[str, Any]:
            (strategy, offload), processes, micro, packing = split
            settings = [f"strategy={strategy}", f"offload={offload}", f"launch.processes={processes}",
                        f"batch.max_tokens_per_micro_batch={micro}", f"data.packing={str(packing).lower()}"]
            off = deviation(run(Path(name) / str(number), args.steps, *settings), reference)
            bound = 1e-5 if offload == "none" else 1e-4
            print(f"{off:.1e} {'ok ' if off <= bound else 'OFF'} {' '.join(settings)}", flush=True)
            return {"settings": settings, "deviation": off, "bound": bound}

        splits = list(enumerate(itertools.product(STRATEGIES, (1, 2), MICRO_BATCHES, (True, False))))
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # single processes side by side
            rows = list(pool.map(lambda numbered: compared(*numbered), [s for s in splits if s[1][1] == 1]))
        # Ranks alone: DeepSpeed's CPU kernels wait actively, and on too few cores starve each other.
        rows += [compared(*numbered) for numbered in splits if numbered[1][1] > 1]
    worst = max(row["deviation"] / row["bound"] for row in rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    print(f"{len(rows)} splits; the worst is at {worst:.2f} of its bound")
    sys.exit(worst > 1)


if __name__ == "__main__":
    main()
