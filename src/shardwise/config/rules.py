"""What settings must agree on with each other, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.config.schema import ROLES, Config


def faults(config: Config, origins: dict[str, str]) -> list[str]:
    """Every contradiction in a config, each with its place and the way out."""
    return [f"{origins.get(key, 'default')}: {text}" for key, text in _all(config)]


def _all(config: Config) -> Iterator[tuple[str, str]]:
    yield from _model(config)
    yield from _data(config)
    yield from _schedule(config)
    yield from _strategy(config)
    yield from _launch(config)


def _model(config: Config) -> Iterator[tuple[str, str]]:
    model = config.model
    if model.path is None and model.from_config is None:
        yield "model.path", "model.path is not set; give a model folder, a hub name or model.from_config"
    if model.path is not None and model.from_config is not None:
        yield "model.path", "model.path and model.from_config are both set; keep one"
    if model.from_config is not None:
        if "model_type" not in model.from_config:
            yield "model.from_config", "model.from_config needs a model_type (llama, qwen3, ...)"
        if model.tokenizer is None:
            yield "model.tokenizer", "model.tokenizer is not set; fresh weights come without a tokenizer"
        if config.adapter.kind != "none":
            yield "adapter.kind", "adapter.kind=lora on fresh random weights would freeze them; use none"
    if model.dtype == "bf16" and config.adapter.kind == "none":
        yield ("model.dtype", "model.dtype=bf16 holds weights that are not trained, and adapter.kind=none "
               "trains them all; use dtype auto, or adapter.kind=lora")
    if model.dtype == "bf16" and config.precision != "bf16":
        yield ("model.dtype", f"model.dtype=bf16 contradicts precision={config.precision}; set precision=bf16 or "
               "dtype=auto")


def _data(config: Config) -> Iterator[tuple[str, str]]:
    if not config.data.train:
        yield "data.train", "data.train is empty; list at least one file, as in data.train=[my.jsonl]"
    limit = config.batch.max_tokens_per_micro_batch
    if config.data.task == "pretrain" and limit != "auto" and limit < config.data.max_length:
        yield ("batch.max_tokens_per_micro_batch",
               f"batch.max_tokens_per_micro_batch={limit} is less than one block of "
               f"data.max_length={config.data.max_length} tokens; raise it or shorten the block")
    if config.data.task == "pretrain" and config.data.max_length < 2:
        yield "data.max_length", "data.max_length=1 leaves no token to predict; use at least 2"
    if config.data.task == "pretrain" and config.data.chat_template is not None:
        yield "data.chat_template", "data.chat_template has no meaning for data.task=pretrain; remove it"
    if config.data.task == "pretrain" and config.data.on_too_long != "error":
        yield "data.on_too_long", "data.on_too_long has no meaning for data.task=pretrain, which cuts blocks; remove it"
    if isinstance(config.data.supervise, tuple):
        unknown = [role for role in config.data.supervise if role not in ROLES]
        if unknown or not config.data.supervise:
            yield ("data.supervise", f"data.supervise: unknown role {', '.join(unknown) or '(none given)'}; known: "
                   f"all, last, or a list of {', '.join(ROLES)}")
    if config.data.task == "pretrain" and config.data.supervise != "all":
        yield "data.supervise", "data.supervise has no meaning for data.task=pretrain; remove it"
    yield from _streaming(config)
    for kind in ("duplicate", "eval_overlap", "marker_text"):
        if config.data.task == "pretrain" and getattr(config.data.on_fault, kind) == "drop":
            yield (f"data.on_fault.{kind}", f"data.on_fault.{kind}=drop: a pretraining text shares its blocks with "
                   "others and cannot be left out afterwards; use error or report")
    if config.eval.every_steps is not None and not config.data.eval:
        yield "eval.every_steps", "eval.every_steps is set but data.eval is empty; add held-out data"
    for key, wanted in (("eval.patience", config.eval.patience is not None),
                        ("checkpoint.keep_best", config.checkpoint.keep_best > 0)):
        if wanted and config.eval.every_steps is None:
            yield key, f"{key} is set but eval.every_steps is not; say how often to evaluate, and on what in data.eval"
    if config.eval.final == "best" and config.checkpoint.keep_best == 0:
        yield "eval.final", "eval.final=best takes a kept checkpoint; set checkpoint.keep_best=1"
    if config.eval.min_delta and config.eval.patience is None:
        yield "eval.min_delta", "eval.min_delta has no meaning without eval.patience; set that too"
    if config.eval.generate_samples and (not config.data.eval or config.data.task == "pretrain"):
        yield "eval.generate_samples", "eval.generate_samples needs held-out chats in data.eval (task sft)"


def _streaming(config: Config) -> Iterator[tuple[str, str]]:
    data = config.data
    if not data.streaming:
        return
    if config.schedule.max_steps is None:
        yield ("data.streaming", "data.streaming=true cannot count its rows; say how long to train with "
               "schedule.max_steps")
    if any(source.weight != 1 or source.limit is not None for source in data.train):
        yield ("data.train", "weight and limit of a source need all rows counted, which data.streaming=true does not; "
               "remove them or set data.streaming=false")
    if data.workers != "auto":
        yield ("data.workers", "data.workers tokenises before training; with data.streaming=true each rank reads ahead "
               "by itself, so remove it")
    if data.on_fault.duplicate != "report":
        yield ("data.on_fault.duplicate", "data.streaming=true remembers no rows, so duplicates cannot be found; "
               "set data.on_fault.duplicate=report")
    if data.on_fault.eval_overlap == "drop":
        yield ("data.on_fault.eval_overlap", "with data.streaming=true the training data is not known when evaluation "
               "begins; use error or report")
    limit = config.batch.max_tokens_per_micro_batch
    if limit != "auto" and limit < data.max_length:
        yield ("batch.max_tokens_per_micro_batch", f"batch.max_tokens_per_micro_batch={limit} is less than "
               f"data.max_length={data.max_length}, and with data.streaming=true the longest row is not known")


def _schedule(config: Config) -> Iterator[tuple[str, str]]:
    schedule = config.schedule
    if schedule.epochs is not None and schedule.max_steps is not None:
        yield "schedule.max_steps", "schedule.epochs and schedule.max_steps are both set; keep one"
    if schedule.warmup_ratio is not None and schedule.warmup_steps is not None:
        yield "schedule.warmup_steps", "schedule.warmup_ratio and schedule.warmup_steps are both set; keep one"
    if schedule.max_steps is not None and (schedule.warmup_steps or 0) > schedule.max_steps:
        yield ("schedule.warmup_steps", f"schedule.warmup_steps={schedule.warmup_steps} is more than "
               f"schedule.max_steps={schedule.max_steps}; the peak would never be reached")
    if schedule.kind == "wsd" and (schedule.warmup_ratio or 0) + schedule.decay_ratio > 1:
        yield ("schedule.decay_ratio", "schedule.warmup_ratio + schedule.decay_ratio is more than 1; "
               "warm-up and decay would overlap")
    if config.optim.name == "adamw" and config.optim.momentum:
        yield "optim.momentum", "optim.momentum belongs to sgd; adamw has betas"


def _strategy(config: Config) -> Iterator[tuple[str, str]]:
    if config.offload == "optimizer" and config.strategy == "ddp":
        yield "offload", "offload=optimizer needs strategy zero1, zero2 or zero3, not ddp"
    if config.offload == "params" and config.strategy in ("ddp", "zero1", "zero2"):
        yield "offload", f"offload=params needs strategy=zero3, not {config.strategy}"
    if config.model.attention == "flash_attention_2" and config.precision == "fp32":
        yield "model.attention", "model.attention=flash_attention_2 computes in bf16 and fp16 only; set precision=bf16"


def _launch(config: Config) -> Iterator[tuple[str, str]]:
    launch = config.launch
    if launch.node_rank >= launch.nodes:
        yield ("launch.node_rank", f"launch.node_rank={launch.node_rank} with launch.nodes={launch.nodes}: "
               f"nodes count from 0 to {launch.nodes - 1}")
    if launch.processes != "auto" and launch.processes % launch.nodes:
        low = launch.processes // launch.nodes * launch.nodes
        yield ("launch.processes", f"launch.processes={launch.processes} cannot be shared equally by "
               f"launch.nodes={launch.nodes}; nearest: {low or launch.nodes} or {low + launch.nodes}")
    if launch.nodes > 1 and launch.main_address is None and launch.hostfile is None:
        yield ("launch.main_address", f"launch.main_address is not set; {launch.nodes} nodes need the address "
               "of node 0 to meet")
