"""The one composition root: from a recipe to the parts the loop runs with. Cheap refusals come first."""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise import dist
from shardwise.checkpoint import store
from shardwise.checkpoint.pieces import Holder, TorchHolder, Zero3Holder, ZeroHolder
from shardwise.config.launcher import from_environment
from shardwise.config.load import load
from shardwise.config.resolve import Resolved, resolve
from shardwise.dist import Ranks
from shardwise.errors import ConfigError, PreflightError
from shardwise.model.adapters import add_adapter
from shardwise.model.load import draw_fresh, load_model
from shardwise.model.loss import router_settings
from shardwise.model.probes import isolates, packing_leak
from shardwise.train import heartbeat, ops
from shardwise.train.best import Best
from shardwise.train.engine import DeepSpeedEngine, Engine, TorchEngine
from shardwise.train.guard import Guard
from shardwise.train.inputs import load_inputs
from shardwise.train.loss_scale import LossScale
from shardwise.train.memory import MicroBatchLimit
from shardwise.train.metrics import Metrics, Tracker, WandbTracker, keep_until
from shardwise.train.optim import make_optimizer
from shardwise.train.parts import Parts
from shardwise.train.provenance import manifest, record_start
from shardwise.train.refusals import FILE as GUARD_FILE
from shardwise.train.results import keep_skeleton, same_base
from shardwise.train.resume import checkpoint_to_resume, root_of
from shardwise.train.signals import StopRequest

log = logging.getLogger("shardwise")
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build(recipe: str, overrides: Sequence[str], *, stop: StopRequest) -> Parts:
    """Everything up to the first step. Raises UserError for whatever the user can mend, before a model loads."""
    env = os.environ
    ranks = dist.ranks_of(env)
    loaded = load(recipe, overrides)
    resolved = resolve(loaded, world_size=ranks.world_size, launcher=from_environment(env))
    config = resolved.config
    stop.time_limit_seconds = resolved.time_limit_seconds
    dist.check_world_size(ranks, _asked_processes(resolved), gpus=dist.visible_gpus(), env=env)
    dist.local_threads(env)
    dist.prefer_cpu_quietly(os.environ)
    check_precision(resolved)
    heartbeat.phase("tokenising")
    inputs = load_inputs(resolved)
    plan = inputs.plan
    facts = manifest(resolved, inputs)
    draw_fresh(resolved, vocabulary=len(inputs.tokenizer))
    ops.build(ops.needed(resolved))
    heartbeat.phase("meeting the other ranks")
    accelerator = make_accelerator(resolved)
    limit = MicroBatchLimit(resolved.max_tokens_per_micro_batch, folder=Path(config.run.output_dir or ""))
    dist.agree({"recipe and data": facts["identity"], "run folder": config.run.output_dir,
                limit.path.name: limit.tokens})
    resume = checkpoint_to_resume(resolved, facts["identity"], ranks)
    if config.run.stop_after is not None and config.run.stop_after > plan.num_steps:
        raise ConfigError(f"{resolved.origins['run.stop_after']}: run.stop_after={config.run.stop_after} is more than "
                          f"the {plan.num_steps} steps of this run")

    facts["base"] = same_base(resolved, ranks, resumed=resume is not None)
    heartbeat.phase("loading the model")
    torch.manual_seed(config.run.seed)
    engine, holder = make_engine(resolved, accelerator, inputs.tokenizer, ranks)
    packing = _packing(resolved, engine, accelerator.device)
    saver = store.Saver(root_of(resolved), holder, ranks, config.checkpoint)
    meta: dict[str, Any] = {}
    if resume is not None:
        heartbeat.phase("loading the checkpoint")
        meta = saver.load(resume, seed=config.run.seed)
    else:
        torch.manual_seed(config.run.seed + 1 + ranks.rank)  # dropout differs between ranks
    metrics = _metrics(resolved, accelerator, facts, meta) if ranks.main else None
    if ranks.main:
        keep_skeleton(resolved, engine.module, inputs, anew=resume is None)
    parts = Parts(
        resolved=resolved, plan=plan, ranks=ranks, device=accelerator.device, engine=engine, saver=saver,
        inputs=inputs, feed=inputs.feed(meta.get("feed", {})), packing=packing,
        router=router_settings(engine.module.config), autocast=autocast(resolved, accelerator.device),
        metrics=metrics, manifest=facts, start_step=meta.get("step", 0), resumed=resume is not None,
        evaluation_owed=meta.get("evaluation_owed", False), stop=stop, guard=Guard(config.guard), limit=limit,
        best=Best(keep=config.checkpoint.keep_best, patience=config.eval.patience, min_delta=config.eval.min_delta))
    for name, part in parts.stateful().items():
        if name in meta.get("loop", {}):
            part.load(meta["loop"][name])
    return parts


def _asked_processes(resolved: Resolved) -> int | None:
    launched = os.environ.get("SHARDWISE_WORLD_SIZE")
    if launched is not None:
        return int(launched)
    asked = resolved.config.launch.processes
    return None if asked == "auto" else asked


def check_precision(resolved: Resolved) -> None:
    """Refuse fp16 under DeepSpeed where it cannot compute in it, before a model is loaded."""
    if resolved.config.precision != "fp16" or resolved.deepspeed is None:
        return
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        raise PreflightError(
            f"{resolved.origins['precision']}: precision=fp16 with strategy={resolved.strategy} needs a GPU, or a CPU "
            "with fp16 kernels (AVX512-FP16), and there is neither; set precision=bf16, or strategy=ddp")


def make_accelerator(resolved: Resolved) -> Any:
    """The Accelerator: process group, device, DDP or DeepSpeed, trackers. Our dicts, not its environment."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    on_gpu = dist.visible_gpus() > 0
    for name in [key for key in os.environ if key.startswith("ACCELERATE_")]:
        # Settled in config/launcher.py; left in place these would settle it a second time.
        os.environ.pop(name)
    # Buffers never change, and syncing them would communicate at every forward.
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)]
    plugin = None
    if resolved.deepspeed is not None:
        # A copy, because accelerate and DeepSpeed both write into it.
        plugin = DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(resolved.deepspeed)))
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        dist.stand_alone(os.environ)
    timeout = datetime.timedelta(minutes=resolved.config.launch.timeout_minutes)
    if "LOCAL_RANK" in os.environ:
        handlers.append(InitProcessGroupKwargs(backend="nccl" if on_gpu else "gloo", timeout=dist.MEETING_TIMEOUT))
    precision = "no" if plugin is None or resolved.config.precision == "fp32" else resolved.config.precision
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints what it built
        accelerator = Accelerator(mixed_precision=precision, cpu=not on_gpu and plugin is None,
                                  deepspeed_plugin=plugin, kwargs_handlers=handlers,
                                  log_with=list(resolved.config.tracking.backends) or None,
                                  project_dir=resolved.config.run.output_dir)
    dist.limit_waits(timeout)  # of those that were still tokenising nobody has waited so far
    return accelerator


def autocast(resolved: Resolved, device: torch.device) -> Callable[[], Any]:
    """Autocast for fp32-held weights; under DeepSpeed the weights are in the lower precision already."""
    if resolved.config.precision != "fp32" and resolved.deepspeed is None:
        return functools.partial(torch.autocast, device.type, dtype=LOW[resolved.config.precision])
    return contextlib.nullcontext


def make_engine(resolved: Resolved, accelerator: Any, tokenizer: Any, ranks: Ranks) -> tuple[Engine, Holder]:
    """The model behind its strategy, and where that keeps its state."""
    config = resolved.config
    model = add_adapter(load_model(resolved, vocabulary=len(tokenizer)), config.adapter)
    model.train()
    if resolved.deepspeed is None:
        model.to(accelerator.device)
    # DeepSpeed swaps in its own CPU Adam under offload and has no use for a fused kernel there.
    optimizer = make_optimizer(model, config.optim, fused=resolved.offload == "none")
    wrapped, prepared = accelerator.prepare(model, optimizer)
    scale = LossScale() if config.precision == "fp16" else None
    if resolved.deepspeed is not None:
        holder: Holder = Zero3Holder(wrapped, rank=ranks.rank) if resolved.strategy == "zero3" else ZeroHolder(wrapped)
        return DeepSpeedEngine(wrapped, scale=scale), holder
    engine = TorchEngine(wrapped, model, optimizer, max_grad_norm=config.optim.max_grad_norm,
                         autocast=autocast(resolved, accelerator.device), scale=scale)
    return engine, TorchHolder(model, optimizer, rank=ranks.rank, world_size=ranks.world_size)


def _packing(resolved: Resolved, engine: Engine, device: torch.device) -> bool:
    wanted = resolved.config.data.packing
    if wanted is False:
        return False
    if _isolates(resolved, engine, device):
        return True
    name = type(engine.module).__name__
    if wanted is True:
        raise ConfigError(f"{resolved.origins['data.packing']}: data.packing=true, but {name} lets packed examples see "
                          "each other; set data.packing=false")
    log.warning("%s lets packed examples see each other, so rows are padded instead (data.packing=auto)", name)
    return False


def _isolates(resolved: Resolved, engine: Engine, device: torch.device) -> bool:
    leak = packing_leak(engine.model, vocabulary=engine.module.config.vocab_size, device=device,
                        autocast=autocast(resolved, device))
    return isolates(leak, low_precision=resolved.config.precision != "fp32")


def _metrics(resolved: Resolved, accelerator: Any, facts: dict[str, Any],
             meta: dict[str, Any]) -> Metrics:
    folder = Path(resolved.config.run.output_dir or "")
    folder.mkdir(parents=True, exist_ok=True)
    tracker = Tracker()
    if resolved.config.tracking.backends:
        tracker = WandbTracker(accelerator, resolved.config.tracking, folder=folder, run_id=meta.get("tracker_run_id"),
                               name=resolved.config.run.name or "", config={**facts["config"], "git": facts["git"]})
    facts["tracker_run_id"] = tracker.run_id
    record_start(folder, facts, from_step=meta.get("step", 0))
    keep_until(folder / GUARD_FILE, meta.get("step"))
    return Metrics(folder / "metrics.jsonl", resume_step=meta.get("step"), tracker=tracker)
