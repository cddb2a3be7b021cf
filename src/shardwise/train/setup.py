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
from shardwise.checkpoint import layout, store
from shardwise.checkpoint.shards import DeepSpeedShards, TorchShards
from shardwise.config.launcher import from_environment
from shardwise.config.load import load
from shardwise.config.resolve import Resolved, resolve
from shardwise.errors import CheckpointError, ConfigError
from shardwise.model.adapters import add_adapter
from shardwise.model.load import draw_fresh, load_model
from shardwise.model.loss import router_settings
from shardwise.model.probes import isolates, packing_leak
from shardwise.train import ops
from shardwise.train.engine import DeepSpeedEngine, Engine, TorchEngine
from shardwise.train.inputs import load_inputs
from shardwise.train.metrics import Metrics, Tracker, WandbTracker
from shardwise.train.optim import make_optimizer
from shardwise.train.parts import Parts
from shardwise.train.provenance import manifest, record_start
from shardwise.train.results import keep_skeleton, same_base
from shardwise.train.signals import StopRequest

log = logging.getLogger("shardwise")


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
    inputs = load_inputs(resolved)
    plan = inputs.plan
    facts = manifest(resolved, inputs)
    draw_fresh(resolved, vocabulary=len(inputs.tokenizer))
    ops.build(ops.needed(resolved))
    accelerator = make_accelerator(resolved)
    resume = _checkpoint_to_resume(resolved, facts)
    dist.agree({"recipe and data": facts["identity"], "checkpoint": str(resume)}, ranks.world_size)
    if config.run.stop_after is not None and config.run.stop_after > plan.num_steps:
        raise ConfigError(f"{resolved.origins['run.stop_after']}: run.stop_after={config.run.stop_after} is more than "
                          f"the {plan.num_steps} steps of this run")

    torch.manual_seed(config.run.seed)
    engine, shards = make_engine(resolved, accelerator, inputs.tokenizer, rank=ranks.rank)
    packing = _packing(resolved, engine, accelerator.device)
    facts["base"] = same_base(resolved, ranks, resumed=resume is not None)
    start_step, state = 0, {}
    if resume is not None:
        store.load(resume, shards, rank=ranks.rank)
        meta = layout.read_meta(resume)
        start_step, state = meta["step"], meta.get("feed", {})
    else:
        torch.manual_seed(config.run.seed + 1 + ranks.rank)  # dropout differs between ranks
    metrics = _metrics(resolved, accelerator, facts, resume) if ranks.main else None
    if ranks.main:
        keep_skeleton(resolved, engine.module, inputs, anew=resume is None)
    return Parts(
        resolved=resolved, plan=plan, ranks=ranks, device=accelerator.device, engine=engine, shards=shards,
        inputs=inputs, feed=inputs.feed(state), packing=packing,
        router=router_settings(engine.module.config), autocast=autocast(resolved, accelerator.device),
        metrics=metrics, manifest=facts, start_step=start_step, stop=stop)


def _asked_processes(resolved: Resolved) -> int | None:
    launched = os.environ.get("SHARDWISE_WORLD_SIZE")
    if launched is not None:
        return int(launched)
    asked = resolved.config.launch.processes
    return None if asked == "auto" else asked


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
    if "LOCAL_RANK" in os.environ:
        timeout = datetime.timedelta(minutes=resolved.config.launch.timeout_minutes)
        handlers.append(InitProcessGroupKwargs(backend="nccl" if on_gpu else "gloo", timeout=timeout))
    precision = "bf16" if plugin is not None and resolved.config.precision == "bf16" else "no"
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints what it built
        return Accelerator(mixed_precision=precision, cpu=not on_gpu and plugin is None, deepspeed_plugin=plugin,
                           kwargs_handlers=handlers, log_with=list(resolved.config.tracking.backends) or None,
                           project_dir=resolved.config.run.output_dir)


def autocast(resolved: Resolved, device: torch.device) -> Callable[[], Any]:
    """bf16 autocast for fp32-held weights; under DeepSpeed the weights are bf16 already."""
    if resolved.config.precision == "bf16" and resolved.deepspeed is None:
        return functools.partial(torch.autocast, device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext


def make_engine(resolved: Resolved, accelerator: Any, tokenizer: Any, *, rank: int) -> tuple[Engine, Any]:
    """The model behind its strategy, and how that strategy's state is saved."""
    config = resolved.config
    model = add_adapter(load_model(resolved, vocabulary=len(tokenizer)), config.adapter)
    model.train()
    if resolved.deepspeed is None:
        model.to(accelerator.device)
    # DeepSpeed swaps in its own CPU Adam under offload and has no use for a fused kernel there.
    optimizer = make_optimizer(model, config.optim, fused=resolved.offload == "none")
    wrapped, prepared = accelerator.prepare(model, optimizer)
    if resolved.deepspeed is not None:
        return DeepSpeedEngine(wrapped), DeepSpeedShards(wrapped, frozen=config.adapter.kind != "none")
    engine = TorchEngine(wrapped, model, optimizer, max_grad_norm=config.optim.max_grad_norm,
                         autocast=autocast(resolved, accelerator.device))
    return engine, TorchShards(model, optimizer, rank=rank)


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
    return isolates(leak, low_precision=resolved.config.precision == "bf16")


def _checkpoint_to_resume(resolved: Resolved, facts: dict[str, Any]) -> Path | None:
    wanted, origin = resolved.config.checkpoint.resume, resolved.origins["checkpoint.resume"]
    root = Path(resolved.config.run.output_dir or "") / "checkpoints"
    newest = layout.latest(root)
    if wanted == "never" and newest is not None:
        raise CheckpointError(f"{origin}: checkpoint.resume=never, but {newest} exists; choose another "
                              "run.output_dir or remove that folder")
    folder = newest if wanted in ("auto", "never") else Path(wanted)
    if folder is not None:
        _refuse_foreign(folder, layout.read_meta(folder), facts["identity"])
    return folder


def _refuse_foreign(folder: Path, meta: dict[str, Any], own: dict[str, Any]) -> None:
    """A checkpoint goes on only where the same curve would be computed."""
    differing = [f"{key} was {json.dumps(meta['curve'].get(key))[:200]} and is {json.dumps(value)[:200]}"
                 for key, value in json.loads(json.dumps(own["curve"])).items() if meta["curve"].get(key) != value]
    if differing:
        raise CheckpointError(f"{folder} belongs to another run: {'; '.join(differing)}. "
                              "Choose another run.output_dir, or put the settings back")
    if meta["strategy"] != own["strategy"] or \
            (own["strategy"] != "ddp" and meta["world_size"] != own["world_size"]):
        raise CheckpointError(
            f"{folder} was saved by {meta['strategy']} on {meta['world_size']} ranks and cannot go on as "
            f"{own['strategy']} on {own['world_size']}; start with strategy={meta['strategy']} on "
            f"{meta['world_size']} ranks")


def _metrics(resolved: Resolved, accelerator: Any, facts: dict[str, Any], resume: Path | None) -> Metrics:
    folder = Path(resolved.config.run.output_dir or "")
    folder.mkdir(parents=True, exist_ok=True)
    meta = layout.read_meta(resume) if resume is not None else {}
    tracker = Tracker()
    if resolved.config.tracking.backends:
        tracker = WandbTracker(accelerator, resolved.config.tracking, folder=folder, run_id=meta.get("tracker_run_id"),
                               name=resolved.config.run.name or "", config={**facts["config"], "git": facts["git"]})
    facts["tracker_run_id"] = tracker.run_id
    record_start(folder, facts, from_step=meta.get("step", 0))
    return Metrics(folder / "metrics.jsonl", resume_step=meta.get("step"), tracker=tracker)
