"""Where things made once are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$SHARDWISE_CACHE`, else `$XDG_CACHE_HOME/shardwise`, else `~/.cache/shardwise`."""
    chosen = os.environ.get("SHARDWISE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "shardwise"
