"""The loop. SFT or pretraining, full or LoRA, DDP or ZeRO: all of that was settled in setup.py."""

from __future__ import annotations

import functools
import json
import logging
import time
from typing import NamedTuple

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from shardwise import dist, outcome
from shardwise.errors import Stopped
from shardwise.train import heartbeat
from shardwise.train.evaluate import score_held_out
from shardwise.train.parts import Parts, StepData
from shardwise.train.record import step_line
from shardwise.train.refusals import answer, wants_rollback
from shardwise.train.schedule import lr_at
from shardwise.train.step import StepResult, optimizer_step

log = logging.getLogger("shardwise")


def train(parts: Parts) -> int:
    """Run from `parts.start_step` to the end of the plan, or of its patience; returns the last step.

    Raises Stopped after an early, complete checkpoint.
    """
    config, plan = parts.resolved.config, parts.plan
    begin(parts)
    progress = tqdm(total=plan.num_steps, initial=parts.start_step, unit="step", disable=not parts.ranks.main,
                    dynamic_ncols=True, desc=config.run.name)
    with logging_redirect_tqdm(), progress as bar:
        for step in range(parts.start_step, 0 if parts.best.exhausted else plan.num_steps):
            heartbeat.phase("training")
            began = time.perf_counter()
            lr = lr_at(step, peak=config.optim.lr, plan=plan, schedule=config.schedule)
            data, result = take_step(parts, step, lr)
            done = step + 1
            outcome.reached(done)
            # From here on: once per optimizer step and on every rank, so collectives are safe.
            if parts.metrics is not None:
                parts.metrics.write(step_line(parts, done, lr, data, result, time.perf_counter() - began))
            if result.refused is not None:
                answer(parts, done, data, result)
            bar.update()
            bar.set_postfix_str(f"loss {result.loss:.4f}, lr {lr:.2e}", refresh=False)
            last = done == plan.num_steps
            asked = parts.held_out is not None and due(done, config.eval.every_steps, last)
            # Under a signal there is no time for it; the next start makes up for it.
            scored = score(parts, done) if asked and not result.stop else Scored(finished=not asked)
            last = last or parts.best.exhausted
            stopping = not scored.finished or ((result.stop or done == config.run.stop_after) and not last)
            ending = (last or stopping) and config.checkpoint.at_end
            saved = due(done, config.checkpoint.every_steps, ending or scored.keep or result.save)
            if saved:
                save(parts, done, scored, must=last or stopping)
            if stopping:
                raise stopped(parts, done, saved=saved)
            if last:
                return done
    return parts.start_step


def begin(parts: Parts) -> None:
    """What comes before the first step of a session. Raises Stopped when a rank was asked to stop meanwhile."""
    if not parts.resumed or parts.evaluation_owed:
        scored = score(parts, parts.start_step)
        if not scored.finished:
            raise Stopped(parts.stop.before_training())
        if scored.keep:
            save(parts, parts.start_step, scored, must=False)
    if not parts.resumed and wants_rollback(parts):
        save(parts, 0, Scored(finished=True), must=True)


def stopped(parts: Parts, done: int, *, saved: bool) -> Stopped:
    """How a run that stops early ends."""
    at = parts.resolved.config.run.stop_after
    reason = parts.stop.reason or ("run.stop_after" if done == at else "another rank")
    kept = f"the checkpoint of step {done} is complete. Start again to go on" if saved else \
        "nothing was saved (checkpoint.at_end=false)"
    return Stopped(f"stopped after step {done} of {parts.plan.num_steps} ({reason}); {kept}")


def take_step(parts: Parts, step: int, lr: float) -> tuple[StepData, StepResult]:
    """Optimizer step `step` (from 0), tried again from the same weights while that can help.

    Raises TrainingError on every rank when an example alone does not fit into memory.
    """
    data = parts.step_data(step)
    while True:
        result = optimizer_step(
            parts.engine, data.batches, lr=lr, supervised_tokens=data.supervised_tokens,
            target_weight=data.target_weight, tokens=data.tokens, world_size=parts.ranks.world_size,
            router=parts.router, stop=parts.stop.wanted(), save=parts.saver.overdue(), guard=parts.guard,
            start_again=functools.partial(parts.limit.start_again, data.rows, data.ids, step=step + 1))
        if result.again is None:
            parts.guard.note(result.loss, result.grad_norm, result.refused)
            return data, result
        if result.again == "memory":
            parts.limit.halve(data.rows, data.ids, step=step + 1)
            data = parts.work(data.rows, data.ids)
            if parts.ranks.main:
                parts.limit.remember()
                log.warning("out of memory in step %d: it is done again, and the run goes on, with micro-batches of "
                            "up to %s tokens", step + 1, f"{parts.limit.tokens:,}")


def due(step: int, every: int | None, force: bool) -> bool:
    """True at multiples of `every` (if set) and when forced."""
    return force or (every is not None and step % every == 0)


class Scored(NamedTuple):
    """What an evaluation came to, the same on every rank."""

    finished: bool
    """False when a rank was asked to stop before its end."""
    loss: float | None = None
    """Rank 0's."""
    keep: bool = False
    """Whether it is among those that `checkpoint.keep_best` keeps."""


def score(parts: Parts, step: int) -> Scored:
    """Evaluate and answer samples; rank 0 writes them down."""
    found = score_held_out(parts, step)
    if found is None:
        return Scored(finished=False)
    loss = dist.told_by_main(None if found.line is None else found.line["eval_loss"])
    scored = Scored(finished=True, loss=loss, keep=loss is not None and parts.best.saw(loss, step=step))
    if parts.metrics is None or found.line is None:
        return scored
    parts.metrics.write(found.line)
    log.info("step %d: eval_loss %.4f (perplexity %.2f)", step, found.line["eval_loss"], found.line["eval_perplexity"])
    for sample in found.samples:
        with open(parts.folder / "samples.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")
        asked, replied = (sample[key].strip().replace("\n", " / ") for key in ("prompt", "reply"))
        log.info("step %d, asked: ...%s\n  replied: %s", step, asked[-160:], replied[:400])
    return scored


def save(parts: Parts, step: int, scored: Scored, *, must: bool) -> None:
    """Publish a checkpoint on all ranks together."""
    heartbeat.phase("saving a checkpoint")
    parts.saver.save(step, {**parts.manifest["identity"], "feed": parts.feed.state(), "eval_loss": scored.loss,
                            "evaluation_owed": not scored.finished,
                            "loop": {name: part.state() for name, part in parts.stateful().items()},
                            "tracker_run_id": parts.manifest.get("tracker_run_id")}, must=must)
