"""metrics.jsonl, always; wandb beside it when asked for and possible. Rank 0 alone."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from shardwise.config.schema import TrackingConfig
from shardwise.export.runs import read_metrics

log = logging.getLogger("shardwise")


class Metrics:
    """Appends one JSON object per line; on a resume, forgets lines from after the checkpoint."""

    def __init__(self, path: Path, *, resume_step: int | None, tracker: Tracker) -> None:
        self.path, self.tracker = path, tracker
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        keep_until(path, resume_step)

    def write(self, values: dict[str, Any]) -> None:
        """Record one line; `values` has a `step`."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self.tracker.log(values)


def keep_until(path: Path, step: int | None) -> None:
    """Forget the lines of a file, if there is one, that are from after `step` (None: all), or cut short."""
    if not path.is_file():
        return
    kept = [row for row in read_metrics(path) if step is not None and row["step"] <= step]
    beside = path.with_name(path.name + ".part")
    beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(beside, path)


class Tracker:
    """No tracker at all."""

    run_id: str | None = None

    def log(self, values: dict[str, Any]) -> None:
        """Send one line of metrics."""

    def finish(self) -> None:
        """Send what is pending."""


class WandbTracker(Tracker):
    """wandb through accelerate. Never asks, never stops a run: a failure is logged once and it goes quiet."""

    def __init__(self, accelerator: Any, tracking: TrackingConfig, *, folder: Path, name: str, run_id: str | None,
                 config: dict[str, Any]) -> None:
        self.accelerator, self.alive = accelerator, True
        self.run_id = run_id or os.environ.get("WANDB_RUN_ID")
        os.environ.setdefault("WANDB_SILENT", "true")
        for mode in self._modes(tracking):
            try:
                self._start(tracking, mode, folder=folder, name=name, config=config)
                return
            except Exception as error:  # a tracker must never end a run, whatever it raises
                log.warning("wandb did not start %s (%s)", mode, error)
        self.alive = False

    @staticmethod
    def _modes(tracking: TrackingConfig) -> list[str]:
        if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
            return [os.environ["WANDB_MODE"]]
        if tracking.mode == "offline":
            return ["offline"]
        if tracking.mode == "auto" and not _has_key():
            return ["offline"]
        return ["online", "offline"]

    def _start(self, tracking: TrackingConfig, mode: str, *, folder: Path, name: str,
               config: dict[str, Any]) -> None:
        import wandb

        settings = {"mode": mode, "dir": str(folder), "name": name, "id": self.run_id, "resume": "allow",
                    "settings": wandb.Settings(init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 60)))}
        self.accelerator.trackers.clear()  # or accelerate would start the one that failed once more
        self.accelerator.init_trackers(tracking.project, config=config, init_kwargs={"wandb": settings})
        run = self.accelerator.get_tracker("wandb", unwrap=True)
        # A resumed run writes steps again that were lost in a crash: they need an axis of their own.
        run.define_metric("*", step_metric="step")
        self.run_id = run.id

    def log(self, values: dict[str, Any]) -> None:
        if not self.alive:
            return
        try:
            self.accelerator.log(values)
        except Exception as error:
            self.alive = False
            log.warning("wandb stopped working (%s); metrics.jsonl has everything", error)

    def finish(self) -> None:
        if self.alive:
            try:
                for tracker in self.accelerator.trackers:  # end_training would wait for the other ranks
                    tracker.finish()
            except Exception as error:
                log.warning("wandb did not finish (%s); metrics.jsonl has everything", error)


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return netrc.is_file() and "api.wandb" in netrc.read_text(errors="ignore")
