"""One run from recipe to final/: set-up, loop, export."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise import dist, lock
from shardwise.config import show
from shardwise.config.load import load
from shardwise.config.secrets import hide
from shardwise.export.runs import read_metrics
from shardwise.train import heartbeat
from shardwise.train.loop import train
from shardwise.train.parts import Parts
from shardwise.train.report import packing_efficiency, write_report
from shardwise.train.results import export, take_best
from shardwise.train.setup import build
from shardwise.train.signals import StopRequest

log = logging.getLogger("shardwise")


def run(recipe: str, overrides: Sequence[str], *, stop: StopRequest) -> Path:
    """Train, then publish `final/`; returns that folder. Raises ShardwiseError for whatever is explained."""
    config = load(recipe, overrides).config
    folder = Path(config.run.output_dir or "")
    stop.folder = folder
    heartbeat.limit(config.launch.stall_minutes)
    with lock.held(folder, main=dist.ranks_of(os.environ).main, job=lock.job_of(os.environ)):
        return _run(recipe, overrides, stop)


def _run(recipe: str, overrides: Sequence[str], stop: StopRequest) -> Path:
    parts = build(recipe, overrides, stop=stop)
    final = parts.folder / "final"
    if (parts.start_step == parts.plan.num_steps or parts.best.exhausted) and (final / "config.json").is_file():
        if parts.ranks.main:
            log.info("already finished at step %d; the model is in %s", parts.start_step, final)
        return final
    if parts.ranks.main:
        keep_log(parts.folder / "log.txt")
        for line in summary(parts):
            log.info("%s", line)
        (parts.folder / "resolved.yaml").write_text(hide(show.text(parts.resolved), os.environ) + "\n",
                                                     encoding="utf-8")
    stop.training()
    try:
        step = train(parts)
        if parts.resolved.config.eval.final == "best":
            step = take_best(parts)
        if parts.resolved.config.checkpoint.at_end:
            heartbeat.phase("writing final/")
            export(parts, final, step=step)
    finally:
        if parts.metrics is not None:
            parts.metrics.tracker.finish()
    if parts.ranks.main:
        if parts.feed.dropped():
            log.info("left out of the stream: %s",
                     ", ".join(f"{kind} {count:,}" for kind, count in parts.feed.dropped().items()))
        write_report(parts.folder)
        efficiency = packing_efficiency(read_metrics(parts.folder / "metrics.jsonl"))
        kept = f"the model is in {final}" if final.is_dir() else "no model was kept (checkpoint.at_end=false)"
        log.info("done: %s, its curves in %s; %.1f%% of the computed tokens were real ones", kept,
                 parts.folder / "report.html", 100 * efficiency)
    return final


def keep_log(path: Path) -> None:
    """From now on, what is said is also written to `path`, with the time."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(handler)


def summary(parts: Parts) -> list[str]:
    """What is about to happen, in numbers."""
    counts, plan = parts.inputs.counts, parts.plan
    trained = sum(_numel(p) for p in parts.engine.module.parameters() if p.requires_grad)
    total = sum(_numel(p) for p in parts.engine.module.parameters())
    return [
        "data: " + ("streamed" if counts is None else _counted(counts)),
        f"model: {trained:,} of {total:,} parameters trained in fp32, arithmetic {parts.resolved.config.precision}, "
        f"{parts.resolved.strategy}, offload {parts.resolved.offload}, "
        f"{'packed' if parts.packing else 'padded'}",
        "steps: " + ("" if plan.examples is None else
                     f"{plan.examples:,} examples / {parts.resolved.config.batch.examples_per_step:,} = "
                     f"{plan.steps_per_epoch:,} per epoch, ")
        + f"{plan.num_steps:,} in all, warm-up {plan.warmup_steps:,}"
        + (f", going on after step {parts.start_step:,}" if parts.start_step else ""),
        show.arithmetic(parts.resolved, None if counts is None else counts["tokens"] / counts["examples"]),
    ]


def _counted(counts: dict[str, Any]) -> str:
    share = counts["supervised_tokens"] / counts["tokens"]
    return (f"{counts['examples']:,} examples of {counts['rows']:,} rows, {counts['tokens']:,} tokens, {share:.1%} "
            f"supervised{_changed(counts)}")


def _changed(counts: dict[str, Any]) -> str:
    """What was left out or cut, where anything was."""
    names = ("truncated", "split", "split_lost", "tokens_lost")
    parts = [f"{name.replace('_', ' ')} {counts[name]:,}" for name in names if counts[name]]
    if counts["dropped"]:
        parts.append("left out: " + ", ".join(f"{kind} {count:,}" for kind, count in counts["dropped"].items()))
    return "; " + "; ".join(parts) if parts else ""


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))
