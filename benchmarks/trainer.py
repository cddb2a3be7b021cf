"""Tokens per second and peak memory: shardwise, a bare torch loop on the same micro-batches, transformers' Trainer.

    ./.venv/bin/python benchmarks/trainer.py [--rounds 5] [--json FILE]

An 8M-parameter Llama with a 32k vocabulary, bf16 autocast, one process, real chats of `chitchat-dataset`
(the demo's package), loss on the replies only (40 % of the tokens). The sides run in turn, each in a
process of its own, and every side trains the same examples in the same optimizer steps, with its default
micro-batch where it has one (shardwise: at most max_length = 1,024 tokens; Trainer: 4 rows). Start-up and the first
two steps are not timed. Memory is the process's peak resident size, imports included.
Needs an otherwise idle machine. Results with date and hardware: docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES_PER_STEP, STEPS, WARM_UP_STEPS = 16, 8, 2
CONVERSATIONS, MAX_LENGTH, VOCABULARY = 128, 1024, 32_000
SIDES = ("shardwise", "bare", "trainer")
RECIPE = f"""
model:
  from_config: {{model_type: llama, hidden_size: 192, intermediate_size: 512, num_hidden_layers: 4,
                num_attention_heads: 6, num_key_value_heads: 6, tie_word_embeddings: true}}
  tokenizer: FOLDER/tokenizer
data:
  train: [{{path: FOLDER/train.jsonl, limit: {CONVERSATIONS}}}]
  max_length: {MAX_LENGTH}
  on_too_long: truncate
batch: {{examples_per_step: {EXAMPLES_PER_STEP}}}
optim: {{lr: 1e-3}}
schedule: {{kind: constant, max_steps: {STEPS}}}
precision: bf16
tracking: {{backends: []}}
"""


def prepare(folder: Path) -> None:
    """A byte-level BPE of 32k merges trained on the chats, the chats themselves, and the recipe."""
    import shutil

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from shardwise import demo

    source = Path(demo.resolve("demo:chitchat/train"))
    shutil.copy(source, folder / "train.jsonl")
    texts = [m["content"] for line in source.read_text(encoding="utf-8").splitlines()
             for m in json.loads(line)["messages"]]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=specials,
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    missing = VOCABULARY - bpe.get_vocab_size()
    bpe.add_tokens([f"<unused{i}>" for i in range(missing)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
                               "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))


def parts_of(folder: Path, run: str) -> Any:
    """The product's own set-up of the benchmark recipe."""
    from shardwise.train.setup import build
    from shardwise.train.signals import StopRequest

    stop = StopRequest(started_at=time.time())
    return build(str(folder / "recipe.yaml"), [f"run.output_dir={folder / run}"], stop=stop)


def run_shardwise(folder: Path, run: str) -> tuple[list[float], list[int]]:
    """The product's loop as it is; a clock stands where rank 0 writes its metrics."""
    from shardwise.train.loop import train

    parts = parts_of(folder, run)
    stamps, tokens, write = [], [], parts.metrics.write

    def stamped(values: dict[str, Any]) -> None:
        write(values)
        stamps.append(time.perf_counter())
        tokens.append(values["tokens"])

    parts.metrics.write = stamped
    train(parts)
    return stamps, tokens


def bare_step(model: Any, optimizer: Any, step: Any) -> None:
    """One optimizer step with nothing but torch."""
    import torch
    from torch.nn.functional import cross_entropy

    for batch in step.batches:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False,
                           logits_to_keep=batch.keep).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum")
        (loss / step.supervised_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def run_bare(folder: Path, run: str) -> tuple[list[float], list[int]]:
    """The bare loop, on micro-batches that lie ready in memory."""
    import torch

    parts = parts_of(folder, run)
    model = parts.engine.module
    steps = [parts.step_data(step) for step in range(STEPS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    stamps = []
    for step in steps:
        bare_step(model, optimizer, step)
        stamps.append(time.perf_counter())
    return stamps, [step.tokens for step in steps]


def run_paired(folder: Path, run: str) -> dict[str, float]:
    """Our step and the bare one in turn, on the same examples in one process: the overhead without its noise.

    Ours includes assembling the batches and writing metrics; the bare one finds its batches in memory.
    """
    import copy

    import torch

    from shardwise.train.record import step_line
    from shardwise.train.step import optimizer_step

    parts = parts_of(folder, run)
    model = copy.deepcopy(parts.engine.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    ready = [parts.step_data(step) for step in range(4)]

    def ours(step: int) -> None:
        data = parts.step_data(step)
        result = optimizer_step(parts.engine, data.batches, lr=1e-3, supervised_tokens=data.supervised_tokens,
                                tokens=data.tokens, world_size=1, router=None, stop=False)
        parts.metrics.write(step_line(parts, step + 1, 1e-3, data, result, 1.0))

    def seconds(work: Any, *args: Any) -> float:
        began = time.perf_counter()
        work(*args)
        return time.perf_counter() - began

    ratios = []
    for turn in range(9):
        for step, data in enumerate(ready):
            sides = {"bare": lambda data=data: bare_step(model, optimizer, data), "ours": lambda step=step: ours(step)}
            order = ("bare", "ours") if (turn + step) % 2 else ("ours", "bare")
            took = {side: seconds(sides[side]) for side in order}
            if turn:  # the first turn meets every shape for the first time
                ratios.append(took["bare"] / took["ours"])
    return {"paired_speed_vs_bare": statistics.median(ratios), "pairs": len(ratios),
            "quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)]}


def run_trainer(folder: Path, run: str) -> tuple[list[float], list[int]]:
    """transformers' Trainer, padded micro-batches of 4 x 4 accumulated, as its users would set it."""
    import datasets
    import numpy as np
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

    from shardwise.data.steps.windows import global_batch

    parts = parts_of(folder, run)
    order = [i for step in range(STEPS) for i in global_batch(
        seed=0, step=step, examples=len(parts.train), examples_per_step=EXAMPLES_PER_STEP)]
    rows = [{"input_ids": ids.tolist(), "labels": np.where(flags, ids, -100).tolist()}
            for ids, flags in parts.train.get(order)]
    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            stamps.append(time.perf_counter())

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> None:
            return None

    arguments = TrainingArguments(
        output_dir=str(folder / run), per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=STEPS,
        bf16=True, use_cpu=True, learning_rate=1e-3, lr_scheduler_type="constant", optim="adamw_torch_fused",
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False)
    InOrder(parts.engine.module, arguments, train_dataset=datasets.Dataset.from_list(rows), callbacks=[Clock()],
            data_collator=DataCollatorForSeq2Seq(parts.tokenizer, label_pad_token_id=-100)).train()
    sizes = [len(row["input_ids"]) for row in rows]
    return stamps, [sum(sizes[s * EXAMPLES_PER_STEP:(s + 1) * EXAMPLES_PER_STEP]) for s in range(STEPS)]


def measure(side: str, folder: Path, run: str) -> None:
    """One side in this process; prints its figures as JSON."""
    import resource

    if side == "paired":
        print(json.dumps(run_paired(folder, run)))
        return
    stamps, tokens = {"shardwise": run_shardwise, "bare": run_bare, "trainer": run_trainer}[side](folder, run)
    timed = sum(tokens[WARM_UP_STEPS:])
    seconds = stamps[-1] - stamps[WARM_UP_STEPS - 1]
    print(json.dumps({"tokens_per_second": timed / seconds,
                      "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}))


def main() -> None:
    """Alternate the sides, print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=(*SIDES, "paired"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--run", default="run")
    args = parser.parse_args()
    if args.side:
        return measure(args.side, args.folder, args.run)
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for number in range(args.rounds):
            for side in SIDES[number % 3:] + SIDES[:number % 3]:
                results[side].append(in_process(side, name, f"{side}-{number}"))
                print(f"round {number + 1}, {side}: {results[side][-1]}", file=sys.stderr, flush=True)
        paired = in_process("paired", name, "paired")
    report(results, paired, args.json)


def in_process(side: str, folder: str, run: str) -> dict[str, float]:
    """One side in a process of its own; its figures."""
    words = [sys.executable, __file__, "--side", side, "--folder", folder, "--run", run]
    output = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if output.returncode:
        sys.exit(f"{side} failed:\n{output.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(output.stdout.strip().splitlines()[-1])
    return figures


def report(results: dict[str, list[dict[str, float]]], paired: dict[str, float], path: Path | None) -> None:
    """Medians of each side and what the issue of speed turns on: ratios."""
    median = {side: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
              for side, rows in results.items()}
    ours, bare, trainer = (median[side] for side in SIDES)
    figures = {"median": median,
               **paired, "speed_vs_bare": ours["tokens_per_second"] / bare["tokens_per_second"],
               "speed_vs_trainer": ours["tokens_per_second"] / trainer["tokens_per_second"],
               "memory_vs_trainer": ours["peak_gib"] / trainer["peak_gib"],
               "cores": os.cpu_count(), "machine": platform.processor() or platform.machine(), "rounds": results}
    for side in SIDES:
        print(f"{side:10} {median[side]['tokens_per_second']:8,.0f} tokens/s  {median[side]['peak_gib']:.2f} GiB")
    print(f"shardwise / bare loop, step by step in turn {paired['paired_speed_vs_bare']:.3f} "
          f"(quartiles {paired['quartiles']}, {paired['pairs']} pairs)")
    print(f"shardwise / bare loop, whole processes {figures['speed_vs_bare']:.3f}")
    print(f"shardwise / Trainer {figures['speed_vs_trainer']:.2f} (memory {figures['memory_vs_trainer']:.2f})")
    if path is not None:
        path.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
