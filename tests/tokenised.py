"""Sources tokenised for tests: in small pieces, counted, slowed down or killed on the way; here or in a process."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from dist.given import TOKENIZER, said
from launched import ROOT, environment
from shardwise.config.schema import DataConfig, ModelConfig, SourceConfig
from shardwise.data.mask.encode import ChatEncoder, TextEncoder
from shardwise.data.read import readers
from shardwise.data.steps.stream import Cursor, Example, Stream
from shardwise.data.store import build, worker
from shardwise.data.store.cached import CachedSource, open_source
from shardwise.data.tokenizer import load_tokenizer
from shardwise.errors import ShardwiseError

VARIABLE = "TOKENISED_BY_TEST"
SECONDS = 120


@cache
def tokenizer() -> Any:
    """The tiny one: 1,024 tokens, with a chat template."""
    return load_tokenizer(ModelConfig(tokenizer=str(TOKENIZER)))


def row(number: int) -> dict[str, Any]:
    """A conversation that says which it is; of 8 lengths."""
    return {"messages": [{"role": "user", "content": f"row {number}"},
                         {"role": "assistant", "content": said(1 + number % 8) + f" of {number}"}]}


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    """A .jsonl file of `row`s."""
    path.write_text("".join(json.dumps(row(first + n)) + "\n" for n in range(count)))
    return path


def data_of(*paths: Path, **fields: Any) -> DataConfig:
    """Each path a source."""
    return DataConfig(train=tuple(SourceConfig(path=str(path)) for path in paths), **fields)


def opened(path: Path, *, limit: int | None = None, **fields: Any) -> CachedSource:
    """One source through the cache."""
    return open_source(SourceConfig(path=str(path), limit=limit), DataConfig(**fields), tokenizer())


def folder_of(cache_root: Path) -> Path:
    """The one complete folder in a cache."""
    (folder,) = (facts.parent for facts in cache_root.glob("tokenised/*/facts.json"))
    return folder


def small_units(patch: Any, size: int) -> None:
    """Cut files into pieces of about so many bytes, wherever they are read."""
    for function in (readers.units, readers.plan):
        patch.setitem(function.__kwdefaults__, "bytes_per_unit", size)
    patch.setattr(build, "piece_size", lambda file: size)


def watched(log: Path, slow: float = 0.0, die: str | None = None) -> None:
    """From now on every row this process encodes is a line in `log`."""
    for kind in (ChatEncoder, TextEncoder):
        kind.__call__ = _watched(kind.__call__, log, slow, die)  # type: ignore[method-assign]


def _watched(inner: Callable[..., Any], log: Path, slow: float, die: str | None) -> Callable[..., Any]:
    def outer(self: Any, items: Any) -> Any:
        names = [item if isinstance(item, str) else item.messages[0]["content"] for item in items]
        if die in names:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(log, "a") as file:
            file.write("".join(f"{name}\n" for name in names))
        time.sleep(slow * len(names))
        return inner(self, items)
    return outer


def start_watched(job: worker.Job, start: Callable[[worker.Job], None] = worker.start) -> None:
    """In place of worker.start, in every tokenising process."""
    told = json.loads(os.environ[VARIABLE])
    watched(Path(told["log"]), told["slow"], told["die"])
    start(job)


def begin(path: Path, cache_root: Path, log: Path, *, workers: int = 1, size: int = 4 << 20, slow: float = 0.0,
          die: str | None = None, most_bytes: int | None = None) -> subprocess.Popen[str]:
    """Another process that opens a source; `most_bytes` is the longest file it may write."""
    told = json.dumps({"path": str(path), "log": str(log), "workers": workers, "size": size, "slow": slow, "die": die,
                       "most_bytes": most_bytes})
    env = environment(**{VARIABLE: told, "SHARDWISE_CACHE": str(cache_root)})
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), env["PYTHONPATH"]])
    return subprocess.Popen([sys.executable, "-m", "tokenised"], env=env, cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it came to: digest, rows and examples, or the error it explains."""
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors[-3000:]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def living(log: Path) -> list[int]:
    """Processes that were told to write to `log`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if str(log).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def epochs(stream: Stream, count: int, cursor: Cursor | None = None) -> list[list[Example]]:
    """The examples of the next epochs."""
    found: list[list[Example]] = [[]]
    for example in stream.examples(cursor or Cursor()):
        if example is None and len(found) == count:
            break
        if example is None:
            found.append([])
        else:
            found[-1].append(example)
    return found


def places(examples: list[Example]) -> list[str]:
    return [example.place for example in examples]


def digest(source: CachedSource) -> str:
    """Of all ids and weights."""
    return hashlib.sha256(source.ids.tobytes() + source.weights.tobytes()).hexdigest()


def main() -> None:
    """Open the source that the variable tells of."""
    import pytest

    import tokenised  # not __main__: the workers must find `start_watched`

    told = json.loads(os.environ[VARIABLE])
    if told["most_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (told["most_bytes"], told["most_bytes"]))
    watched(Path(told["log"]), told["slow"], told["die"])
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch, told["size"])
        patch.setattr(worker, "start", tokenised.start_watched)
        try:
            source = opened(Path(told["path"]), workers=told["workers"])
            result = {"digest": digest(source), "rows": source.facts["rows"], "examples": len(source.index["line"])}
        except ShardwiseError as error:
            result = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
