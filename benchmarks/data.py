"""The data pipeline against the bare tokenizer: speed, memory, start-up from the cache, packed against padded.

    ./.venv/bin/python benchmarks/data.py [speed] [memory] [cache] [packing] [--json FILE]

speed    render + tokenise + mask + write (a build with every core) against the fast tokenizer alone on the same
         rendered texts, with all its threads; in turn, 3 rounds, each side in a process of its own. Start-up counts
         on our side, the tokenizer's start-up does not on its.
memory   highest resident memory of a build, its workers included, for 20,000 and 200,000 conversations.
cache    time from the start of a process to the first batch, for 1,000,000 rows that are in the cache.
packing  tokens per second of the same examples packed and padded, step by step in turn, for a small Llama on the
         lengths of chitchat.
Needs an otherwise idle machine. Results with date and hardware: docs/performance.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPEED, SMALL, LARGE, CACHED = 16_000, 20_000, 200_000, 1_000_000
ROUNDS = 3
TOKENIZER = "demo:smollm2-135m-instruct"


def conversations(count: int, turns: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Conversations of real turns (chitchat), drawn anew with a fixed seed: none is like another."""
    from shardwise import demo

    with open(demo.resolve("demo:chitchat/train"), encoding="utf-8") as file:
        said = [message["content"] for line in file for message in json.loads(line)["messages"]]
    draw = random.Random(0)
    for number in range(count):
        size = 2 * draw.randint(*turns)
        texts = [f"{number}: {draw.choice(said)}", *draw.choices(said, k=size - 1)]
        yield {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def write(path: Path, count: int, turns: tuple[int, int]) -> None:
    """A .jsonl file of conversations."""
    with path.open("w", encoding="utf-8") as file:
        for row in conversations(count, turns):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def settings(path: Path) -> Any:
    """The data section of a recipe that trains on the file."""
    from shardwise.config.schema import DataConfig, SourceConfig

    return DataConfig(train=(SourceConfig(path=str(path)),), max_length=1 << 16)


def tokenizer() -> Any:
    """The real one of SmolLM2."""
    from shardwise.config.schema import ModelConfig
    from shardwise.data.tokenizer import load_tokenizer

    return load_tokenizer(ModelConfig(path=TOKENIZER))


def side_build(path: Path) -> dict[str, Any]:
    """Ours, from rows on disk to a cache on disk."""
    from shardwise.data.store.load import load_data

    chosen = tokenizer()
    began = time.perf_counter()
    examples = load_data(settings(path), chosen).train
    return {"tokens": examples.counts["tokens"], "seconds": time.perf_counter() - began}


def side_bare(path: Path) -> dict[str, Any]:
    """The fast tokenizer alone, all threads, nothing kept but the ids."""
    chosen = tokenizer()
    with path.open(encoding="utf-8") as file:
        texts = [chosen.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in file]
    began, tokens = time.perf_counter(), 0
    for start in range(0, len(texts), 1000):
        tokens += sum(map(len, chosen(texts[start:start + 1000], add_special_tokens=False)["input_ids"]))
    return {"tokens": tokens, "seconds": time.perf_counter() - began}


def side_first_batch(path: Path) -> dict[str, Any]:
    """From the import of the package to the tensors of step 0; `opening_seconds` is without libraries and tokenizer."""
    began = time.perf_counter()
    from shardwise.data.steps.batch import make_batch
    from shardwise.data.steps.windows import global_batch, split
    from shardwise.data.store.load import load_data

    chosen = tokenizer()
    ready = time.perf_counter()
    examples = load_data(settings(path), chosen).train
    ids = global_batch(seed=0, step=0, parts=examples.parts, examples_per_step=64)
    window = split(ids, examples.lengths, world_size=1, max_tokens=8192, packing=True)
    batch = make_batch(window[0][0], examples, pad_id=0, max_tokens=8192)
    now = time.perf_counter()
    return {"rows": len(examples), "tokens": batch.tokens, "seconds": now - began, "opening_seconds": now - ready}


SIDES = {"build": side_build, "bare": side_bare, "first_batch": side_first_batch}


def run(side: str, path: Path, cache: Path, watch: bool = False) -> dict[str, Any]:
    """One side in a fresh process; `watch` adds the highest resident memory of it and its children."""
    env = {**os.environ, "SHARDWISE_CACHE": str(cache), "TOKENIZERS_PARALLELISM": "true"}
    child = subprocess.Popen([sys.executable, __file__, "--side", side, "--path", str(path)], env=env,
                             stdout=subprocess.PIPE, text=True)
    peak: list[int] = [0]
    watcher = threading.Thread(target=_watch, args=(child, peak), daemon=True)
    if watch:
        watcher.start()
    out, _ = child.communicate()
    if child.returncode != 0:
        raise SystemExit(f"{side} failed")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {**result, "peak_mib": round(peak[0] / 2**20)} if watch else result


def _watch(child: subprocess.Popen[str], peak: list[int]) -> None:
    import psutil

    parent = psutil.Process(child.pid)
    while child.poll() is None:
        total = 0
        for process in [parent, *parent.children(recursive=True)]:
            try:
                total += process.memory_full_info().uss  # pages of shared libraries and files count once or not at all
            except psutil.Error:
                continue
        peak[0] = max(peak[0], total)
        time.sleep(0.1)


def warm_demo(cache: Path) -> None:
    """The demo's files are made once in the usual cache and linked, so that no side pays for them."""
    from shardwise import demo
    from shardwise.config.cache import cache_root

    demo.resolve(TOKENIZER), demo.resolve("demo:chitchat/train")
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "demo").exists():
        (cache / "demo").symlink_to(cache_root() / "demo")


def speed(folder: Path) -> dict[str, Any]:
    """Tokens per second of both sides, in turn."""
    path = folder / "speed.jsonl"
    write(path, SPEED, (2, 20))
    rates: dict[str, list[float]] = {"build": [], "bare": []}
    for number, side in itertools.product(range(ROUNDS), rates):
        cache = folder / f"speed-{number}"
        warm_demo(cache)
        result = run(side, path, cache)
        rates[side].append(result["tokens"] / result["seconds"])
        print(f"{side}: {result['tokens']:,} tokens, {rates[side][-1]:,.0f} tokens/s", flush=True)
    middle = {side: statistics.median(values) for side, values in rates.items()}
    return {"tokens_per_second": middle, "ratio": round(middle["build"] / middle["bare"], 3)}


def memory(folder: Path) -> dict[str, Any]:
    """Peak memory of a small and a large build."""
    peaks = {}
    for count in (SMALL, LARGE):
        path = folder / f"memory-{count}.jsonl"
        write(path, count, (1, 4))
        warm_demo(folder / "memory")
        result = run("build", path, folder / "memory", watch=True)
        peaks[count] = result["peak_mib"]
        print(f"{count:,} conversations, {result['tokens']:,} tokens: peak {peaks[count]:,} MiB, "
              f"{result['seconds']:.0f} s", flush=True)
        path.unlink()
    return {"peak_mib": peaks, "growth_mib": peaks[LARGE] - peaks[SMALL]}


def cache(folder: Path) -> dict[str, Any]:
    """Seconds to the first batch of a million cached rows."""
    path = folder / "cache.jsonl"
    write(path, CACHED, (1, 1))
    warm_demo(folder / "cache")
    built = run("build", path, folder / "cache")
    opened = [run("first_batch", path, folder / "cache") for _ in range(ROUNDS)]
    for result in opened:
        print(f"{result['rows']:,} rows, first batch after {result['seconds']:.2f} s, "
              f"{result['opening_seconds']:.2f} s of them for the data", flush=True)
    return {"rows": opened[0]["rows"], "file_mib": round(path.stat().st_size / 2**20), "tokens": built["tokens"],
            "build_seconds": round(built["seconds"]),
            "first_batch_seconds": round(statistics.median(r["seconds"] for r in opened), 2),
            "opening_seconds": round(statistics.median(r["opening_seconds"] for r in opened), 2)}


def packing(folder: Path) -> dict[str, Any]:
    """Real tokens per second of optimizer steps, packed and padded in turn."""
    from shardwise.train.setup import build
    from shardwise.train.signals import StopRequest
    from shardwise.train.step import optimizer_step

    recipe = folder / "packing.yaml"
    recipe.write_text(f"""
model:
  from_config: {{model_type: llama, hidden_size: 192, intermediate_size: 512, num_hidden_layers: 4,
                num_attention_heads: 6, num_key_value_heads: 6, tie_word_embeddings: true}}
  tokenizer: "{TOKENIZER}"
data: {{train: [{{path: "demo:chitchat/train", limit: 400}}], max_length: 1024, on_too_long: drop}}
batch: {{examples_per_step: 16}}
schedule: {{kind: constant, max_steps: 100}}
precision: bf16
tracking: {{backends: []}}
""")
    parts = build(str(recipe), [f"run.output_dir={folder / 'packing'}"], stop=StopRequest(started_at=time.time()))
    rates: dict[bool, list[float]] = {True: [], False: []}
    efficiency: dict[bool, list[float]] = {True: [], False: []}
    for step in range(26):
        for packed in ((True, False) if step % 2 else (False, True)):
            parts.packing = packed
            data = parts.step_data(step)
            began = time.perf_counter()
            optimizer_step(parts.engine, data.batches, lr=1e-5, supervised_tokens=data.supervised_tokens,
                           target_weight=data.target_weight, tokens=data.tokens, world_size=1, router=None, stop=False)
            if step > 1:
                rates[packed].append(data.tokens / (time.perf_counter() - began))
                efficiency[packed].append(data.packing_efficiency)
    ratio = statistics.median(a / b for a, b in zip(rates[True], rates[False], strict=True))
    names = {True: "packed", False: "padded"}
    return {"tokens_per_second": {names[k]: round(statistics.median(v)) for k, v in rates.items()},
            "efficiency": {names[k]: round(statistics.mean(v), 3) for k, v in efficiency.items()},
            "ratio": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="speed, memory, cache, packing; all when none is given")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(SIDES[given.side](given.path)))
        return
    parts = {"speed": speed, "memory": memory, "cache": cache, "packing": packing}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.what or parts:
            results[name] = parts[name](Path(folder))
            print(name, json.dumps(results[name]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
