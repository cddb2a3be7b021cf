"""Read a YAML node as the type a field wants.

Nothing is guessed from how a scalar looks: `1e-5` is a float where a float is wanted and text where text
is wanted, and `0123`, `12:30` or `no` never become numbers or truth values behind the user's back.
"""

from __future__ import annotations

import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from shardwise.config.schema import Duration, Range, SourceConfig

INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\Z")
DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\Z")
NULLS = ("null", "~", "", "None")
TRUTH = {"true": True, "True": True, "false": False, "False": False}


class Misfit(Exception):
    """The value does not fit; `str(self)` says what would."""


def duration_seconds(text: str) -> int:
    """Seconds in `90s`, `30m`, `12h` or `1h30m`. Raises Misfit."""
    found = DURATION.fullmatch(text)
    if not text or not found:
        raise Misfit("a length of time such as 90s, 30m, 12h or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def read(node: Node, hint: Any) -> Any:
    """The node's value as `hint` (a type from schema.py). Raises Misfit saying what is wanted."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _bounded(read(node, get_args(hint)[0]), get_args(hint)[1:])
    if origin in (Union, types.UnionType):
        return _either(node, get_args(hint))
    if origin is Literal:
        return _choice(node, get_args(hint))
    if origin is tuple:
        return _sequence(node, get_args(hint))
    if origin is dict:
        if not isinstance(node, MappingNode):
            raise Misfit("a mapping of names to values")
        return plain(node)
    if hint is SourceConfig:
        return _source(node)
    return _scalar(node, hint)


def plain(node: Node) -> Any:
    """A free-form node by the YAML 1.2 core schema (for mappings that belong to another library)."""
    if isinstance(node, MappingNode):
        return {key.value: plain(value) for key, value in node.value}
    if isinstance(node, SequenceNode):
        return [plain(item) for item in node.value]
    assert isinstance(node, ScalarNode), node
    text = str(node.value)
    if node.style in ("'", '"'):
        return text
    if text in NULLS:
        return None
    if text in TRUTH:
        return TRUTH[text]
    if INT.match(text):
        return int(text)
    return float(text) if FLOAT.match(text) else text


def _scalar(node: Node, hint: type) -> Any:
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    if not isinstance(node, ScalarNode):
        raise Misfit(wanted)
    text = str(node.value)
    if hint is str:
        if text in NULLS and node.style not in ("'", '"'):
            raise Misfit("text")
        return text
    if hint is bool and text in TRUTH:
        return TRUTH[text]
    if hint is int and INT.match(text):
        return int(text)
    if hint is float and FLOAT.match(text):
        return float(text)
    raise Misfit(wanted)


def _bounded(value: Any, marks: tuple[Any, ...]) -> Any:
    for mark in marks:
        if isinstance(mark, Duration):
            duration_seconds(value)
        if isinstance(mark, Range):
            low, high, exclusive = mark
            if low is not None and (value < low or (exclusive and value == low)):
                raise Misfit(f"{'more than' if exclusive else 'at least'} {low:g}" if high is None
                             else f"a number from {low:g} to {high:.10g}")
            if high is not None and value > high:
                raise Misfit(f"a number from {low or 0:g} to {high:.10g}")
            if value in (float("inf"), float("-inf")):
                raise Misfit("a finite number")
    return value


def _either(node: Node, options: tuple[Any, ...]) -> Any:
    if type(None) in options and isinstance(node, ScalarNode) and node.value in NULLS \
            and node.style not in ("'", '"'):
        return None
    wanted = []
    for option in options:
        if option is type(None):
            continue
        try:
            return read(node, option)
        except Misfit as misfit:
            wanted.append(str(misfit))
    raise Misfit(" or ".join(dict.fromkeys(wanted)))


def _choice(node: Node, options: tuple[Any, ...]) -> Any:
    if isinstance(node, ScalarNode) and node.value in options:
        return node.value
    raise Misfit(("one of " if len(options) > 1 else "") + ", ".join(map(str, options)))


def _sequence(node: Node, inner: tuple[Any, ...]) -> tuple[Any, ...]:
    many = len(inner) == 2 and inner[1] is Ellipsis
    if isinstance(node, ScalarNode) and many and node.value not in NULLS:
        return (read(node, inner[0]),)  # a single item need not be a list
    if not isinstance(node, SequenceNode):
        raise Misfit("a list")
    if many:
        return tuple(read(item, inner[0]) for item in node.value)
    if len(node.value) != len(inner):
        raise Misfit(f"a list of {len(inner)}")
    return tuple(read(item, hint) for item, hint in zip(node.value, inner, strict=True))


def _source(node: Node) -> SourceConfig:
    if isinstance(node, ScalarNode) and node.value not in NULLS:
        return SourceConfig(path=node.value)
    if not isinstance(node, MappingNode):
        raise Misfit("a file, or a mapping with `path` or `hub`")
    hints = get_type_hints(SourceConfig, include_extras=True)
    given: dict[str, Any] = {}
    for key, value in node.value:
        if key.value not in hints:
            raise Misfit(f"a mapping with {', '.join(hints)} (not {key.value!r})")
        given[key.value] = read(value, hints[key.value])
    if (given.get("path") is None) == (given.get("hub") is None):
        raise Misfit("either `path` or `hub` in each source")
    return SourceConfig(**given)
