"""The tokenizer of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise import demo
from shardwise.config.schema import ModelConfig
from shardwise.errors import ConfigError


def load_tokenizer(model: ModelConfig) -> Any:
    """The fast tokenizer of a model. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer

    name = demo.resolve(model.tokenizer or model.path or "")
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place_of(name), trust_remote_code=model.trust_remote_code)
    except Exception as error:  # many kinds, all about this name
        raise ConfigError(f"no tokenizer can be loaded from {name!r}: {error}") from None
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer of {name!r} is not a fast one; masks need its character offsets")
    return tokenizer


def place_of(name: str) -> dict[str, str]:
    """from_pretrained's arguments for a folder, a hub name or a .gguf file."""
    path = Path(name)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": name}
