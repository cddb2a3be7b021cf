"""Asking all ranks, inside a long piece of work, whether one of them wants to stop."""

from __future__ import annotations

import time

import torch

from shardwise.dist import sum_over_ranks
from shardwise.train.signals import StopRequest

ASK_SECONDS = 1.0


class StopAsked:
    """Answers alike on every rank at the same batch, and asks them about once a second.

    How many batches make a second comes out of what the ranks tell each other, so all ask at the same ones.
    """

    def __init__(self, stop: StopRequest, device: torch.device) -> None:
        self.stop, self.device = stop, device
        self.batches = self.left = 1
        self.asked_at = time.perf_counter()

    def __call__(self) -> bool:
        """Called once per batch on every rank."""
        self.left -= 1
        return self.left <= 0 and self.now()

    def now(self) -> bool:
        """The same without waiting for the second to pass; on every rank."""
        now = time.perf_counter()
        told = torch.tensor([float(self.stop.wanted()), now - self.asked_at, 1.0], dtype=torch.float64)
        wishes, seconds, ranks = sum_over_ranks(told.to(self.device)).tolist()
        self.asked_at = time.perf_counter()
        per_batch = seconds / ranks / self.batches
        self.batches = self.left = max(1, min(2 * self.batches, int(ASK_SECONDS / max(per_batch, 1e-6))))
        return bool(wishes > 0)
