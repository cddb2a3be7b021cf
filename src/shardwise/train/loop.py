"""The loop. SFT or pretraining, full or LoRA, DDP or ZeRO: all of that was settled in setup.py."""

from __future__ import annotations

import json
import logging
import time

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from shardwise import outcome
from shardwise.checkpoint import store
from shardwise.errors import Stopped
from shardwise.train.evaluate import evaluate, samples
from shardwise.train.parts import Parts
from shardwise.train.record import step_line
from shardwise.train.schedule import lr_at
from shardwise.train.step import optimizer_step

log = logging.getLogger("shardwise")


def train(parts: Parts) -> None:
    """Run from `parts.start_step` to the end of the plan. Raises Stopped after an early, complete checkpoint."""
    config, plan = parts.resolved.config, parts.plan
    if parts.start_step == 0:
        score(parts, 0)
    progress = tqdm(total=plan.num_steps, initial=parts.start_step, unit="step", disable=not parts.ranks.main,
                    dynamic_ncols=True, desc=config.run.name)
    with logging_redirect_tqdm(), progress as bar:
        for step in range(parts.start_step, plan.num_steps):
            began = time.perf_counter()
            data = parts.step_data(step)
            lr = lr_at(step, peak=config.optim.lr, plan=plan, schedule=config.schedule)
            result = optimizer_step(parts.engine, data.batches, lr=lr, supervised_tokens=data.supervised_tokens,
                                    target_weight=data.target_weight, tokens=data.tokens,
                                    world_size=parts.ranks.world_size, router=parts.router,
                                    stop=parts.stop.wanted())
            done = step + 1
            outcome.reached(done)
            # From here on: once per optimizer step and on every rank, so collectives are safe.
            if parts.metrics is not None:
                parts.metrics.write(step_line(parts, done, lr, data, result, time.perf_counter() - began))
            bar.update()
            bar.set_postfix_str(f"loss {result.loss:.4f}, lr {lr:.2e}", refresh=False)
            last = done == plan.num_steps
            if due(done, config.eval.every_steps, last):
                score(parts, done)
            stopping = (result.stop or done == config.run.stop_after) and not last
            saved = due(done, config.checkpoint.every_steps, (last or stopping) and config.checkpoint.at_end)
            if saved:
                save(parts, done)
            if stopping:
                reason = parts.stop.reason or ("run.stop_after" if done == config.run.stop_after else "another rank")
                kept = f"the checkpoint of step {done} is complete. Start again to go on" if saved else \
                    "nothing was saved (checkpoint.at_end=false)"
                raise Stopped(f"stopped after step {done} of {plan.num_steps} ({reason}); {kept}")


def due(step: int, every: int | None, force: bool) -> bool:
    """True at multiples of `every` (if set) and when forced."""
    return force or (every is not None and step % every == 0)


def score(parts: Parts, step: int) -> None:
    """Evaluate and answer samples; rank 0 writes them down."""
    line, written = evaluate(parts, step), samples(parts, step)
    if parts.metrics is None:
        return
    if line is not None:
        parts.metrics.write(line)
        log.info("step %d: eval_loss %.4f (perplexity %.2f)", step, line["eval_loss"], line["eval_perplexity"])
    for sample in written:
        with open(parts.folder / "samples.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")
        asked, replied = (sample[key].strip().replace("\n", " / ") for key in ("prompt", "reply"))
        log.info("step %d, asked: ...%s\n  replied: %s", step, asked[-160:], replied[:400])


def save(parts: Parts, step: int) -> None:
    """Publish a checkpoint on all ranks together."""
    meta = {**parts.manifest["identity"], "step": step, "feed": parts.feed.state(),
            "tracker_run_id": parts.manifest.get("tracker_run_id")}
    store.save(parts.folder / "checkpoints", step, parts.shards, meta, rank=parts.ranks.rank,
               keep=parts.resolved.config.checkpoint.keep)
