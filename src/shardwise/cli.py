"""The `shardwise` command: parse, dispatch, and turn a user's mistake into words and an exit code.

Everything heavier than argparse is imported by the command that needs it; torch by none.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
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
        "  data check   read all data, count it, and name every row that is wrong",
        "  data show    one row as the model sees it: tokens, and which of them are supervised",
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
        # A rank that was killed leaves its progress bar without an end of line.
        print("\n" * (result.exit_code == EXIT_FAILURE) + result.message, file=sys.stderr, flush=True)
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


def data(words: list[str]) -> int:
    """`shardwise data check` and `shardwise data show`."""
    actions = {"check": data_check, "show": data_show}
    if words and words[0] in actions:
        return actions[words[0]](words[1:])
    if not words or words[0] in ("-h", "--help"):
        print("usage: shardwise data check RECIPE [--json]\n       shardwise data show RECIPE --row N [--html FILE]\n"
              "shardwise data check --help and shardwise data show --help say more.")
        return EXIT_OK if words else EXIT_USER
    near = difflib.get_close_matches(words[0], actions, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise UserError(f"shardwise data has no command {words[0]!r}{hint} Commands: {', '.join(actions)}")


def data_check(words: list[str]) -> int:
    """`shardwise data check`: exit code 2 where training would not start, or would be wrong."""
    parsed = _parse("data check", "Read all data of a recipe, count it, and name every row that is wrong.", words,
                    {"--json": "print one JSON object, with the address of every faulty row (the first 1,000 a kind)"})
    from shardwise.data.look import check
    from shardwise.data.tokenizer import load_tokenizer

    config = _ready(parsed).config
    report, found = check.check(config.data, load_tokenizer(config.model))
    print(json.dumps(report, ensure_ascii=False, indent=1) if parsed.flags.json else check.text(report, found))
    return EXIT_OK if report["ok"] else EXIT_USER


def data_show(words: list[str]) -> int:
    """`shardwise data show`: one row in the terminal or as a page."""
    parsed = _parse("data show", "Show one row as the model sees it: tokens, and which of them are supervised.", words,
                    {"--eval": "a row of data.eval instead of data.train"},
                    {"--row": ("N", "number of the row, from 1, or its FILE:LINE"),
                     "--html": ("FILE", "write a page to FILE instead")})
    from shardwise.data.look import show
    from shardwise.data.tokenizer import load_tokenizer

    config = _ready(parsed).config
    tokenizer = load_tokenizer(config.model)
    found = show.find(parsed.flags.row or "1", config.data.eval if parsed.flags.eval else config.data.train,
                      config.data, tokenizer)
    page = show.page(found, tokenizer, recipe=parsed.recipe, html=parsed.flags.html is not None,
                     colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
                     width=shutil.get_terminal_size((100, 24)).columns)
    if parsed.flags.html is None:
        print(page)
    else:
        try:
            Path(parsed.flags.html).write_text(page, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {parsed.flags.html}: {error}") from None
        print(f"{parsed.flags.html} shows {found.place}")
    return EXIT_OK


def _ready(parsed: Words) -> Loaded:
    """The settings, with the files they name checked and the demo's made."""
    from shardwise import demo
    from shardwise.launch import preflight

    loaded, _ = _load(parsed)
    preflight.check_files(loaded)
    demo.prepare([name for name in preflight.demo_names(loaded)])
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that is not UTF-8 gets question marks, not a traceback
        sys.stdout.reconfigure(errors="replace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return loaded


COMMANDS: dict[str, Callable[[list[str]], int]] = {"train": train, "config": config, "data": data}


def _parse(name: str, about: str, words: list[str], flags: dict[str, str],
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
