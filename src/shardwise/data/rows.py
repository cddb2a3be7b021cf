"""What passes from one stage of `data` to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardwise.data.faults import RowFault

FLAGS = ("empty_turn", "marker_text", "terminator_untrained", "truncated", "split", "split_lost")
"""What may be said of an example: usable faults of data/faults.py, cut at its end, one of several parts of a
conversation, and one of a conversation of which another part was too long even alone."""


class Read(NamedTuple):
    """One row as it was read: its line (counted from 1) and the object there, or why there is none."""

    line: int
    value: dict[str, Any] | RowFault


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the one shape the rest works with, whatever format it came in."""

    messages: list[dict[str, Any]]
    """As a chat template gets them: `role`, `content` (text), where they apply `tool_calls` (arguments as an
    object), `tool_call_id`, `name`, `reasoning_content`. Nothing that only we read."""
    weights: list[float]
    """Loss weight of each message: 1.0 as a rule, 0.0 for `train: false`."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools on offer."""
    notes: tuple[str, ...] = ()
    """Those of FLAGS that the conversation as such earns."""


class Encoded(NamedTuple):
    """One example, ready to train on."""

    ids: np.ndarray
    """int32 [T]."""
    weights: np.ndarray
    """float32 [T]: loss weight of predicting this token, 0 where it carries none. weights[0] is always 0:
    nothing precedes the first token."""
    notes: tuple[str, ...] = ()
    """Those of FLAGS that apply."""
