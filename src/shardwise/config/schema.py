"""Every setting there is: frozen dataclasses, the unit in the name, the meaning beneath.

Types drive parsing (config/values.py); `Range` bounds are checked there too, with file:line.
`None` always means "not set", never "required".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple


class Range(NamedTuple):
    """Inclusive bounds of a number; `exclusive_low` turns the lower one into "more than"."""

    low: float | None = None
    high: float | None = None
    exclusive_low: bool = False


class Duration(NamedTuple):
    """Marks a text field holding a length of time: `90s`, `30m`, `12h`, `1h30m`."""


Count = Annotated[int, Range(1)]
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, exclusive_low=True)]
Share = Annotated[float, Range(0, 1)]
Beta = Annotated[float, Range(0, 0.999999999)]
ROLES = ("system", "developer", "user", "assistant", "tool")
Fate = Literal["error", "drop"]
SoftFate = Literal["error", "drop", "report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    name: str | None = None
    """Name of the run; the recipe's file name when not set."""
    output_dir: str | None = None
    """Folder of this run's metrics, checkpoints and final model; `runs/NAME` when not set."""
    seed: int = 0
    """Seeds the data order, fresh weights and dropout."""
    stop_after: Count | None = None
    """Stop after this optimizer step as at a signal: checkpoint, then exit code 3."""
    time_limit: Annotated[str, Duration()] | None = None
    """Stop like `stop_after` once this much time has passed since the start: `90s`, `30m`, `12h`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    path: str | None = None
    """A Hugging Face folder, a hub name, a .gguf file, or `demo:smollm2-135m-instruct`."""
    from_config: dict[str, Any] | None = None
    """Fresh random weights instead: `model_type` and the fields of its transformers config."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; the model's own when not set."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Held dtype of weights that are not trained. Trained weights always have an fp32 master copy.
    auto: bf16 for a frozen base under `precision: bf16`, else fp32."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel; auto is sdpa."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass. auto: on with `offload: params`, else off."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    kind: Literal["none", "lora"] = "none"
    """none trains all weights; lora trains low-rank matrices beside the frozen ones (arXiv:2106.09685)."""
    rank: Count = 16
    """Width of the low-rank matrices."""
    alpha: Positive = 32.0
    """The update is scaled by alpha / rank."""
    dropout: Share = 0.0
    """Dropout before the low-rank matrices; splits agree exactly only at 0."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear modules to adapt; each must match something."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained and saved whole beside the adapter (`embed_tokens`, say)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    path: str | None = None
    """A file (.jsonl, .json, .parquet, .csv, .txt; also .gz of the text ones), a folder, a glob or a `demo:` name."""
    hub: str | None = None
    """A Hugging Face dataset: a name or a local folder."""
    subset: str | None = None
    """Configuration of a `hub` dataset, for those that have several."""
    split: str = "train"
    """Split of a `hub` dataset."""
    format: Literal["auto", "messages", "conversations", "prompt_completion", "instruction", "text"] = "auto"
    """What a row looks like. messages: role/content (OpenAI). conversations: from/value (ShareGPT).
    instruction: instruction, input, output (Alpaca). auto: the first of these whose columns are there."""
    columns: dict[str, str] | None = None
    """Our column name -> the name in the file, as in `{prompt: question, completion: answer}`."""
    roles: dict[str, str] | None = None
    """Role in the file -> system, user, assistant or tool, besides the usual ones (human, gpt, ...)."""
    weight: Positive = 1.0
    """How often each row is seen per epoch: 2 is twice, 0.5 is a different half each epoch."""
    limit: Count | None = None
    """Use only the first so many rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultConfig:
    """error: stop, naming every row. drop: leave the rows out and count them. report: keep and count them."""

    broken_json: Fate = "error"
    """Not valid JSON, or not an object."""
    bad_utf8: Fate = "error"
    """Bytes or escapes that are not text."""
    oversized_row: Fate = "error"
    """One row of more than 16 MiB."""
    wrong_schema: Fate = "error"
    """No known format fits, or a value has the wrong type."""
    mixed_schema: Fate = "error"
    """Another format than the rows before it in its source."""
    no_messages: Fate = "error"
    """No message, or no assistant turn to learn from."""
    null_content: Fate = "error"
    """A turn whose content is null or missing."""
    empty_turn: SoftFate = "error"
    """A turn with nothing but white space; report trains an empty answer's end of turn."""
    empty_text: Fate = "error"
    """A pretraining text with nothing but white space."""
    unknown_role: Fate = "error"
    """A role that is none of system, developer, user, assistant, tool."""
    role_order: Fate = "error"
    """An assistant turn before any user turn, a late system turn, a tool result that nothing called for."""
    bad_tools: Fate = "error"
    """Tool calls or tool schemas that are not what the format asks for."""
    truncated_answer: Fate = "error"
    """An answer its source marks as cut off (finish_reason: length)."""
    prompt_trained: Fate = "error"
    """An answer that begins with its whole prompt, which would be trained as if answered."""
    template_refused: Fate = "error"
    """The chat template refuses the conversation."""
    text_lost: Fate = "error"
    """The chat template leaves a turn's text out."""
    mask_disagreement: Fate = "error"
    """Two independent readings of what to supervise differ, or cannot be made certain."""
    no_supervised: Fate = "error"
    """No token carries loss."""
    terminator_untrained: SoftFate = "error"
    """The template ends an answer with no control token, so stopping is never learned."""
    marker_text: SoftFate = "report"
    """Text equal to a control token; it is tokenised as ordinary text."""
    duplicate: SoftFate = "report"
    """The same conversation as an earlier training row."""
    eval_overlap: SoftFate = "error"
    """An evaluation row that is also in the training data; drop leaves it out of the evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    task: Literal["sft", "pretrain"] = "sft"
    """sft: chats, loss on the assistant's turns. pretrain: text in blocks, loss on every token."""
    train: tuple[SourceConfig, ...] = ()
    """What to train on, in this order before shuffling."""
    eval: tuple[SourceConfig, ...] = ()
    """Held out; scored before, during (`eval.every_steps`) and after training."""
    chat_template: str | None = None
    """A .jinja file to use in place of the tokenizer's own template."""
    supervise: Literal["all", "last"] | tuple[str, ...] = "all"
    """Which turns carry loss: all of the assistant's, the last of them, or those of a list of roles.
    A message's own `train: false` or `weight: 0.5` goes on top."""
    max_length: Count = 2048
    """Most tokens in one example; the block length for pretraining."""
    on_too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """A longer conversation: stop and name it, leave it out, cut its end off, or split it between turns into
    several that fit, each with the system turn. All are counted."""
    on_fault: FaultConfig = field(default_factory=FaultConfig)
    """What to do about faulty rows, kind by kind."""
    streaming: bool = False
    """Read rows as they are needed and keep nothing on disk; needs `schedule.max_steps`."""
    workers: Literal["auto"] | Count = "auto"
    """Processes that tokenise, once, before training. auto: one per core for more than a few thousand rows."""
    packing: Literal["auto"] | bool = "auto"
    """Several examples in a row, kept apart by position ids. auto: where the model provably isolates them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    examples_per_step: Count = 64
    """Examples per optimizer step, over all ranks. The hardware never changes this."""
    max_tokens_per_micro_batch: Literal["auto"] | Count = "auto"
    """Most tokens (padding included) one rank runs at once. auto: `data.max_length`, the least that fits
    any example. Accumulation follows from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    name: Literal["adamw", "sgd"] = "adamw"
    """adamw (arXiv:1711.05101) or plain sgd with `momentum`."""
    lr: Positive = 1e-5
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled for adamw; never on biases and norms."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """adamw's averaging factors of gradient and squared gradient."""
    eps: Positive = 1e-8
    """adamw's term in the denominator."""
    momentum: Beta = 0.0
    """sgd's momentum."""
    max_grad_norm: Positive | None = 1.0
    """Clip the global gradient norm to this once per step; null turns clipping off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """Shape after the warm-up. wsd: constant, then a linear decay over the last `decay_ratio`."""
    warmup_ratio: Share | None = None
    """Share of all steps spent rising linearly to the peak (rounded up). Not with `warmup_steps`."""
    warmup_steps: Annotated[int, Range(0)] | None = None
    """The same as a number of steps."""
    min_lr_ratio: Share = 0.0
    """Lowest learning rate as a share of the peak."""
    decay_ratio: Share = 0.2
    """Share of all steps in wsd's final decay."""
    epochs: Positive | None = None
    """Passes over the training data; 1 when neither this nor `max_steps` is set."""
    max_steps: Count | None = None
    """Optimizer steps in all, instead of `epochs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    processes: Literal["auto"] | Count = "auto"
    """Ranks over all nodes. auto: one per visible GPU on each node, else `cpu_processes`."""
    cpu_processes: Count = 1
    """Ranks per node under `processes: auto` on a machine without a GPU."""
    nodes: Count = 1
    """Machines taking part."""
    node_rank: Annotated[int, Range(0)] = 0
    """Which of them this one is, from 0."""
    main_address: str | None = None
    """Host name or address of node 0; needed with more than one node."""
    main_port: Annotated[int, Range(1, 65535)] | None = None
    """Port of the rendezvous on node 0; a free one when not set (29500 with several nodes)."""
    hostfile: str | None = None
    """Optional `HOST slots=N` lines, one per node, checked against `nodes` and `processes`."""
    forward_env: tuple[str, ...] = ()
    """Environment variables to repeat in the commands printed for the other nodes."""
    timeout_minutes: Positive = 30.0
    """Longest wait of one rank for the others in a collective."""
    stall_minutes: Positive = 15.0
    """Longest time without progress of a rank in training, evaluation or saving (a micro-batch, a batch, a
    checkpoint), or without a sign of life at any time; the job is then ended, naming the rank and its stack."""
    restarts: Annotated[int, Range(0)] = 0
    """How often our launcher starts again by itself, from the newest checkpoint, after a rank died or stalled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: Count | None = None
    """Optimizer steps between checkpoints; only at the end and on a stop when not set."""
    every_minutes: Positive | None = None
    """The same by the clock: at the first step after this many minutes without a checkpoint. Both may be set."""
    at_end: bool = True
    """Save after the last step and where a run stops before it, and write `final/`. false, for tries, keeps only
    what `every_steps` saves."""
    keep: Count = 2
    """Newest complete checkpoints to keep; older ones go after a newer one is complete."""
    keep_best: Annotated[int, Range(0)] = 0
    """Besides those, keep this many of the lowest evaluation loss; an evaluation that is among them also saves."""
    resume: str = "auto"
    """auto: go on from the newest complete checkpoint in the run folder, if any, on any number of ranks and with any
    strategy. never: refuse a folder that has one. Anything else: the folder of a checkpoint, which must be complete."""
    async_save: bool = False
    """Copy the state to host memory and write it to disk while training goes on; needs as much memory again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    every_steps: Count | None = None
    """Optimizer steps between evaluations, besides the ones before and after training."""
    generate_samples: Annotated[int, Range(0)] = 0
    """Held-out conversations answered greedily at each evaluation, written to the log."""
    max_new_tokens: Count = 64
    """Longest generated sample, in tokens."""
    patience: Count | None = None
    """End training after this many evaluations in a row without a new lowest loss."""
    min_delta: NonNegative = 0.0
    """How much lower than the lowest so far a loss must be to count for `patience`, in nats."""
    final: Literal["last", "best"] = "last"
    """Weights of `final/`: those of the last step, or of the kept checkpoint with the lowest evaluation loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """stop: end with an error that names the rows. skip: go on without this step. rollback: go back to the weights
    of the last checkpoint and on with the next step's data (as PaLM did, arXiv:2204.02311, section 5.1)."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do about a step whose loss or gradient norm is inf or NaN."""
    spike: Literal["off", "stop", "skip", "rollback"] = "off"
    """What to do about a step whose loss or gradient norm is far above those before it."""
    spike_z: Positive = 6.0
    """How far is too far: standard deviations above the median, estimated from the median deviation."""
    spike_window_steps: Annotated[int, Range(4)] = 100
    """Steps a new one is compared with; none is called a spike before 20 of them (or all) have been seen."""
    max_skips: Count = 5
    """Most steps in a row that may be refused; the next one ends the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    backends: tuple[Literal["wandb"], ...] = ("wandb",)
    """Trackers besides metrics.jsonl, which is always written."""
    project: str = "shardwise"
    """Project of the tracker."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """auto: online when an API key is at hand, else offline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Arithmetic of forward and backward; sums, norms and the optimizer are fp32 either way. fp16 scales the loss
    as far as its gradients allow (under ZeRO it needs a GPU or a CPU with fp16 kernels)."""
    strategy: Literal["auto", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """How ranks share the work. auto: the launcher's when it names one, else ddp."""
    offload: Literal["none", "optimizer", "params"] = "none"
    """Keep optimizer state (zero1-3), or parameters too (zero3), in host memory."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
