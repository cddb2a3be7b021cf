"""The loop. SFT or pretraining, full or LoRA, DDP or ZeRO: all of that was settled in setup.py."""

from __future__ import annotations

import functools
import json
import logging
import time

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from shardwise import dist, outcome
from shardwise.errors import Stopped
from shardwise.train.evaluate import evaluate, samples
from shardwise.train.parts import Parts, StepData
from shardwise.train.record import step_line
from shardwise.train.refusals import answer, wants_rollback
from shardwise.train.schedule import lr_at
from shardwise.train.step import StepResult, optimizer_step

log = logging.getLogger("shardwise")


def train(parts: Parts) -> None:
    """Run from `parts.start_step` to the end of the plan. Raises Stopped after an early, complete checkpoint."""
    config, plan = parts.resolved.config, parts.plan
    if not parts.resumed and (loss := score(parts, 0)) is not None:
        parts.best.saw(loss, step=0)
    if not parts.resumed and wants_rollback(parts):
        save(parts, 0, eval_loss=None, must=True)
    progress = tqdm(total=plan.num_steps, initial=parts.start_step, unit="step", disable=not parts.ranks.main,
                    dynamic_ncols=True, desc=config.run.name)
    with logging_redirect_tqdm(), progress as bar:
        for step in range(parts.start_step, 0 if parts.best.exhausted else plan.num_steps):
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
            loss = score(parts, done) if due(done, config.eval.every_steps, last) else None
            worth_keeping = loss is not None and parts.best.saw(loss, step=done)
            last = last or parts.best.exhausted
            stopping = (result.stop or done == config.run.stop_after) and not last
            if due(done, config.checkpoint.every_steps, last or stopping or worth_keeping):
                save(parts, done, eval_loss=loss, must=last or stopping)
            if last:
                break
            if stopping:
                reason = parts.stop.reason or ("run.stop_after" if done == config.run.stop_after else "another rank")
                raise Stopped(f"stopped after step {done} of {plan.num_steps} ({reason}); the checkpoint of step "
                              f"{done} is complete. Start again to go on")


def take_step(parts: Parts, step: int, lr: float) -> tuple[StepData, StepResult]:
    """Optimizer step `step` (from 0), tried again from the same weights while that can help.

    Raises TrainingError on every rank when an example alone does not fit into memory.
    """
    data = parts.step_data(step)
    while True:
        result = optimizer_step(
            parts.engine, data.batches, lr=lr, supervised_tokens=data.supervised_tokens,
            target_weight=data.target_weight, tokens=data.tokens, world_size=parts.ranks.world_size,
            router=parts.router, stop=parts.stop.wanted(), guard=parts.guard,
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


def score(parts: Parts, step: int) -> float | None:
    """Evaluate and answer samples; rank 0 writes them down. Returns rank 0's evaluation loss, on every rank."""
    line, written = evaluate(parts, step), samples(parts, step)
    loss: float | None = dist.gathered(None if line is None else line["eval_loss"], dist.second_group())[0]
    if parts.metrics is None:
        return loss
    if line is not None:
        parts.metrics.write(line)
        log.info("step %d: eval_loss %.4f (perplexity %.2f)", step, line["eval_loss"], line["eval_perplexity"])
    for sample in written:
        with open(parts.folder / "samples.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")
        asked, replied = (sample[key].strip().replace("\n", " / ") for key in ("prompt", "reply"))
        log.info("step %d, asked: ...%s\n  replied: %s", step, asked[-160:], replied[:400])
    return loss


def save(parts: Parts, step: int, *, eval_loss: float | None, must: bool) -> None:
    """Publish a checkpoint on all ranks together."""
    parts.saver.save(step, {**parts.manifest["identity"], "feed": parts.feed.state(), "eval_loss": eval_loss,
                            "loop": {name: part.state() for name, part in parts.stateful().items()},
                            "tracker_run_id": parts.manifest.get("tracker_run_id")}, must=must)
