"""The `shardwise` command: parse, dispatch, and turn a user's mistake into words and an exit code.

Everything heavier than argparse is imported by the command that needs it; torch by none.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardwise import __version__
from shardwise.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER, ShardwiseError, UserError

if TYPE_CHECKING:
    from shardwise.config.load import Loaded
    from shardwise.launch.nodes import World

SETTINGS = """settings follow the recipe: section.key=value, --section.key=value or --section.key value.
exit codes: 0 done; 2 a mistake in the input; 3 stopped with a complete checkpoint; 1 anything else."""


class Words(NamedTuple):
    """One command's words, taken apart."""

    recipe: str
    overrides: list[str]
    flags: argparse.Namespace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. A user's mistake is printed without a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except ShardwiseError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_FAILURE
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return EXIT_OK if words else EXIT_USER
    if words[0] in ("-V", "--version"):
        print(f"shardwise {__version__}")
        return EXIT_OK
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"shardwise has no command {words[0]!r}{hint} Commands: {', '.join(COMMANDS)}")
    return COMMANDS[words[0]](words[1:])


def _overview() -> str:
    return "\n".join([
        "usage: shardwise COMMAND RECIPE [section.key=value ...]", "",
        "Train a language model the same way on whatever hardware you have.", "",
        "  train    start a recipe on this machine (or this node of several)",
        "  config   show every setting with where it came from, and the numbers derived from them",
        "", "shardwise COMMAND --help says more; shardwise --version tells the version.", SETTINGS])


def train(words: list[str]) -> int:
    """`shardwise train`: check, then start the ranks and wait for them."""
    parsed = _parse("train", "Start a recipe.", words, {
        "--dry-run": "prepare everything, print the exact commands and the arithmetic, start nothing"})
    from shardwise import demo
    from shardwise.launch import command, nodes, preflight, sweep

    loaded, overrides = _load(parsed)
    env = dict(os.environ)
    extra = sweep.overrides(loaded, env)
    if extra:
        overrides = [*overrides, *extra]
        loaded, _ = _load(parsed._replace(overrides=overrides))
    where = _world(loaded)
    arithmetic = _arithmetic(loaded, where)
    preflight.check_files(loaded)
    port = nodes.meeting_port(loaded, where)
    commands = command.commands(loaded, where, port, parsed.recipe, overrides, env, command.available_cores())
    demo.prepare(preflight.demo_names(loaded))
    if parsed.flags.dry_run:
        for one in commands:
            print(command.printed(one, nodes=where.nodes, folder=Path.cwd()))
        print(arithmetic)
        return EXIT_OK
    from shardwise.launch.run import run

    result = run(commands[where.node_rank], where, env)
    if result.message:
        print(result.message, file=sys.stderr, flush=True)
    return result.exit_code


def config(words: list[str]) -> int:
    """`shardwise config`: the resolved settings, as text or JSON."""
    parsed = _parse("config", "Show every setting of a recipe and where it came from.", words,
                    {"--json": "print one JSON object"})
    from shardwise.config import show
    from shardwise.config.launcher import Launcher
    from shardwise.config.resolve import resolve

    loaded, _ = _load(parsed)
    resolved = resolve(loaded, world_size=_world(loaded).processes, launcher=Launcher())
    print(show.as_json(resolved) if parsed.flags.json else show.text(resolved))
    return EXIT_OK


COMMANDS: dict[str, Callable[[list[str]], int]] = {"train": train, "config": config}


def _parse(name: str, about: str, words: list[str], flags: dict[str, str]) -> Words:
    """Known flags may stand anywhere; the first word left is the recipe and the rest are settings."""
    parser = argparse.ArgumentParser(prog=f"shardwise {name}", description=about, epilog=SETTINGS,
                                     allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file that states model, data and global batch")
    parser.add_argument("settings", metavar="section.key=value", nargs="*", help="settings that beat the file's")
    for flag, meaning in flags.items():
        parser.add_argument(flag, action="store_true", help=meaning)
    known = ("-h", "--help", *flags)
    rest = [word for word in words if word not in known]
    if not {"-h", "--help"}.intersection(words) and (not rest or rest[0].startswith("-")):
        said = f"; {rest[0]!r} is no recipe" if rest else ""
        raise UserError(f"shardwise {name}: the recipe comes first, then its settings{said}. "
                        f"Try: shardwise {name} recipes/demo.yaml")
    namespace = parser.parse_args([*(word for word in words if word in known), *rest[:1]])
    return Words(namespace.recipe, rest[1:], namespace)


def _load(parsed: Words) -> tuple[Loaded, list[str]]:
    from shardwise.config.load import load

    return load(parsed.recipe, parsed.overrides), parsed.overrides


def _world(loaded: Loaded) -> World:
    from shardwise.launch import devices, nodes

    return nodes.world(loaded, devices.visible_gpus(os.environ, devices.physical_gpus()))


def _arithmetic(loaded: Loaded, where: World) -> str:
    """The arithmetic line; resolving also finds contradictions that only show with the number of ranks."""
    from shardwise.config import show
    from shardwise.config.launcher import Launcher
    from shardwise.config.resolve import resolve

    return show.arithmetic(resolve(loaded, world_size=where.processes, launcher=Launcher()))


if __name__ == "__main__":
    sys.exit(main())
