"""Files a recipe names, checked before anything is started."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from shardwise.config.load import Loaded
from shardwise.errors import ConfigError

DEMO = "demo:"
ALWAYS_LOCAL = ("data.train", "data.eval", "data.chat_template")
FILE_ENDINGS = (".jsonl", ".ndjson", ".json", ".txt", ".md", ".rst", ".gguf", ".jinja", ".safetensors", ".parquet")


def demo_names(loaded: Loaded) -> list[str]:
    """The `demo:` names a config uses, each once."""
    return list(dict.fromkeys(name for _, name in _named(loaded) if name.startswith(DEMO)))


def check_files(loaded: Loaded) -> None:
    """Raises ConfigError naming every local file or folder that is not there."""
    local = [(key, name) for key, name in _named(loaded)
             if not name.startswith(DEMO) and (key in ALWAYS_LOCAL or looks_local(name))]
    faults = [f"{loaded.origins[key]}: {key}={name}: no such file or folder (seen from {Path.cwd()})"
              for key, name in local if not Path(name).exists() and not any(glob.iglob(name, recursive=True))]
    if faults:
        raise ConfigError(faults)


def looks_local(name: str) -> bool:
    """Whether a model or tokenizer name can only mean a path: a hub name has one slash and no file ending."""
    return name.startswith((".", "/", "~")) or name.endswith(FILE_ENDINGS) or name.count("/") > 1


def _named(loaded: Loaded) -> Iterator[tuple[str, str]]:
    config = loaded.config
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        yield from ((key, source.path) for source in sources if source.path is not None)
    for key, name in (("model.path", config.model.path), ("model.tokenizer", config.model.tokenizer),
                      ("data.chat_template", config.data.chat_template)):
        if name is not None:
            yield key, name
