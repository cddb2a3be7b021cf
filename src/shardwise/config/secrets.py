"""What must never be written down: values of secret variables, and text that looks like a key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
HIDDEN = "***"
# Hugging Face, wandb, GitHub and OpenAI-like keys, and the name and password of a URL.
LOOKS = re.compile(r"(?<![A-Za-z0-9])(hf_\w{16,}|wandb_v\d_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|sk-[\w-]{16,})|"
                   r"(?<=://)[^/\s@]+(?=@)")
SHORTEST = 8
"""Characters; what is shorter (`TOKENIZERS_PARALLELISM=false`) is no secret, and would be found everywhere."""


def hide(value: Any, env: Mapping[str, str]) -> Any:
    """`value` (text, or dicts and lists of it) with every secret in it replaced by `***`."""
    secrets = sorted((text for name, text in env.items()
                      if SECRET.search(name) and len(text) >= SHORTEST and not os.path.exists(text)),
                     key=len, reverse=True)
    return _hidden(value, secrets)


def _hidden(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {_hidden(key, secrets): _hidden(inner, secrets) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hidden(inner, secrets) for inner in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    return LOOKS.sub(HIDDEN, value)
