"""A command's words: recipe, settings, flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.config.load import Loaded

SETTINGS = """settings follow the recipe: section.key=value, --section.key=value or --section.key value.
exit codes: 0 done; 2 a mistake in the input; 3 stopped with a complete checkpoint; 1 anything else."""


class Words(NamedTuple):
    """One command's words, taken apart."""

    recipe: str
    overrides: list[str]
    flags: argparse.Namespace


def parse(name: str, about: str, words: list[str], flags: dict[str, str],
           valued: Mapping[str, tuple[str, str]] | None = None) -> Words:
    """Known flags may stand anywhere; the first word left is the recipe and the rest are settings.

    `valued`: flags that take a value, with its name and meaning.
    """
    parser = argparse.ArgumentParser(prog=f"shardwise {name}", description=about, epilog=SETTINGS,
                                     allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file that states model, data and global batch")
    parser.add_argument("settings", metavar="section.key=value", nargs="*", help="settings that beat the file's")
    for flag, meaning in flags.items():
        parser.add_argument(flag, action="store_true", help=meaning)
    for flag, (value, meaning) in (valued or {}).items():
        parser.add_argument(flag, metavar=value, help=meaning)
    known, rest = _apart(words, ("-h", "--help", *flags), valued or {})
    if not {"-h", "--help"}.intersection(words) and (not rest or rest[0].startswith("-")):
        said = f"; {rest[0]!r} is no recipe" if rest else ""
        raise UserError(f"shardwise {name}: the recipe comes first, then its settings{said}. "
                        f"Try: shardwise {name} recipes/demo.yaml")
    namespace = parser.parse_args([*known, *rest[:1]])
    return Words(namespace.recipe, rest[1:], namespace)


def _apart(words: list[str], flags: Sequence[str],
           valued: Mapping[str, tuple[str, str]]) -> tuple[list[str], list[str]]:
    """(flags with their values, everything else), each in order."""
    known, rest = [], []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word in flags or word.partition("=")[0] in valued:
            known.append(word)
            if word in valued:
                if not queue or queue[0].startswith("--"):
                    raise UserError(f"{word} needs a value: {word} {valued[word][0]}")
                known.append(queue.pop(0))
        else:
            rest.append(word)
    return known, rest


def load_recipe(parsed: Words) -> tuple[Loaded, list[str]]:
    """The settings, and the overrides among them."""
    from shardwise.config.load import load

    return load(parsed.recipe, parsed.overrides), parsed.overrides
