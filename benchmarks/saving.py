"""How long training waits for a checkpoint: written while it waits, and copied first (checkpoint.async_save).

    python benchmarks/saving.py [--parameters 60000000] [--saves 5] [--folder FOLDER]

One process, a stack of linear layers with AdamW in fp32 (12 bytes per parameter), steps in between so that the copy
competes with training as it would. The two ways take turns. Prints medians and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from shardwise.checkpoint.pieces import TorchHolder
from shardwise.checkpoint.store import Saver
from shardwise.config.schema import CheckpointConfig
from shardwise.dist import Ranks

WIDTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, default=60_000_000)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    words = parser.parse_args()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False)
                                  for _ in range(max(1, words.parameters // WIDTH**2))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = torch.randn(64, WIDTH)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    step()
    with tempfile.TemporaryDirectory(dir=words.folder) as folder:
        savers = {way: Saver(Path(folder) / way, TorchHolder(model, optimizer, rank=0, world_size=1), Ranks(0, 0, 1),
                             CheckpointConfig(keep=1, async_save=way == "async")) for way in ("sync", "async")}
        waited: dict[str, list[float]] = {"sync": [], "async": []}
        behind: list[float] = []
        alone = statistics.median(step() for _ in range(10))
        during: list[float] = []
        for number in range(1, words.saves + 2):
            for way, saver in savers.items():
                began = time.perf_counter()
                seconds = saver.save(number, {"world_size": 1}, must=False)
                while saver._thread is not None and saver._thread.is_alive():
                    during.append(step())
                saver.settle(must=True)
                if number > 1:  # the first time the memory for the copy is taken
                    waited[way].append(seconds)
                    if way == "async":
                        behind.append(time.perf_counter() - began)
    sync, background = (statistics.median(waited[way]) for way in ("sync", "async"))
    size = sum(p.numel() for p in model.parameters()) * 12 / 2**20
    print(f"{size:,.0f} MiB per checkpoint, {words.saves} of each, medians: training waits {sync:.2f} s for a "
          f"synchronous save, {background:.3f} s with async_save: {background / sync:.1%}. The write behind it took "
          f"{statistics.median(behind):.2f} s; a step takes {1000 * alone:.0f} ms alone and "
          f"{1000 * statistics.median(during):.0f} ms beside it")


if __name__ == "__main__":
    main()
