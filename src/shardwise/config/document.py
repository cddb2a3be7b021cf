"""A recipe file or an override as (dotted key, YAML node, place) entries; no values are interpreted here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from shardwise.errors import ConfigError

COMMAND_LINE = "command line"


class Entry(NamedTuple):
    """One setting as written: `optim.lr`, its node, and where (`recipes/x.yaml:12` or `command line`)."""

    key: str
    node: Node
    place: str


def compose(text: str, place: str) -> Node | None:
    """The YAML node graph of `text`; None when it holds nothing. Raises ConfigError with the line."""
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None and place != COMMAND_LINE else ""
        raise ConfigError(f"{place}{line}: not valid YAML: {error.problem or error.context}") from None
    except YAMLError as error:
        raise ConfigError(f"{place}: not valid YAML: {str(error).splitlines()[0]}") from None
    return node


def entries_of_file(path: Path, sections: frozenset[str], free: frozenset[str],
                    faults: list[str]) -> list[Entry]:
    """Every leaf setting in a recipe; duplicate keys and misshapen sections are added to `faults`.

    `sections` are the dotted keys that hold further keys, `free` those whose mapping is one value.
    Raises ConfigError for a file that cannot be read at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    root = compose(text, str(path))
    if root is None:
        return []
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{path}:1: a recipe is a mapping of sections, not {type(root).__name__[:-4].lower()}")
    return list(_walk(root, "", path, sections, free, faults))


def _walk(node: MappingNode, prefix: str, path: Path, sections: frozenset[str], free: frozenset[str],
          faults: list[str]) -> Iterator[Entry]:
    seen: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        key = prefix + str(key_node.value).replace("-", "_")
        if key in seen:
            faults.append(f"{path}:{line}: {key!r} is given twice (first in line {seen[key]}); keep one")
            continue
        seen[key] = line
        empty = isinstance(value, ScalarNode) and value.value in ("", "null", "~")
        if key in sections and empty:
            continue  # a section with all its keys commented out
        if key in sections and not isinstance(value, MappingNode):
            faults.append(f"{path}:{line}: {key!r} is a section and needs keys beneath it, not {value.value!r}")
        elif isinstance(value, MappingNode) and key not in free:
            yield from _walk(value, key + ".", path, sections, free, faults)
        else:
            yield Entry(key, value, f"{path}:{line}")


def entries_of_overrides(words: Sequence[str], faults: list[str]) -> list[Entry]:
    """Settings from the command line: `a.b=v`, `--a.b=v`, `--a.b v`, `--a.b` (true); `-` and `_` alike.

    Every word that is none of these is named in `faults`.
    """
    entries = []
    index = 0
    while index < len(words):
        word, dashed = words[index], words[index].startswith("--")
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals and dashed:
            follows = index + 1 < len(words) and not words[index + 1].startswith("--") \
                and "=" not in words[index + 1].partition(" ")[0]
            value = words[index + 1] if follows else "true"
            index += follows
        if (not equals and not dashed) or not key:
            faults.append(f"{COMMAND_LINE}: {word!r} is not a setting; write section.key=value")
        else:
            try:
                node = compose(value, f"{COMMAND_LINE}: {key}")
                entries.append(Entry(key.replace("-", "_"), node or ScalarNode("", ""), COMMAND_LINE))
            except ConfigError as error:
                faults.extend(error.faults)
        index += 1
    return entries
