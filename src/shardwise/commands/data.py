"""`shardwise data check` and `shardwise data show`."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.commands.words import Words, load_recipe, parse
from shardwise.errors import EXIT_OK, EXIT_USER, UserError

if TYPE_CHECKING:
    from shardwise.config.load import Loaded


def data(words: list[str]) -> int:
    """`shardwise data check` and `shardwise data show`."""
    actions = {"check": check, "show": show}
    if words and words[0] in actions:
        return actions[words[0]](words[1:])
    if not words or words[0] in ("-h", "--help"):
        print("usage: shardwise data check RECIPE [--json]\n       shardwise data show RECIPE --row N [--html FILE]\n"
              "shardwise data check --help and shardwise data show --help say more.")
        return EXIT_OK if words else EXIT_USER
    near = difflib.get_close_matches(words[0], actions, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise UserError(f"shardwise data has no command {words[0]!r}{hint} Commands: {', '.join(actions)}")


def check(words: list[str]) -> int:
    """`shardwise data check`: exit code 2 where training would not start, or would be wrong."""
    parsed = parse("data check", "Read all data of a recipe, count it, and name every row that is wrong.", words,
                    {"--json": "print one JSON object, with the address of every faulty row (the first 1,000 a kind)"})
    from shardwise.data.look import check as checking
    from shardwise.data.tokenizer import load_tokenizer

    config = _ready(parsed).config
    report, found = checking.check(config.data, load_tokenizer(config.model))
    print(json.dumps(report, ensure_ascii=False, indent=1) if parsed.flags.json else checking.text(report, found))
    return EXIT_OK if report["ok"] else EXIT_USER


def show(words: list[str]) -> int:
    """`shardwise data show`: one row in the terminal or as a page."""
    parsed = parse("data show", "Show one row as the model sees it: tokens, and which of them are supervised.", words,
                    {"--eval": "a row of data.eval instead of data.train"},
                    {"--row": ("N", "number of the row, from 1, or its FILE:LINE"),
                     "--html": ("FILE", "write a page to FILE instead")})
    from shardwise.data.look import show as showing
    from shardwise.data.tokenizer import load_tokenizer

    config = _ready(parsed).config
    tokenizer = load_tokenizer(config.model)
    found = showing.find(parsed.flags.row or "1", config.data.eval if parsed.flags.eval else config.data.train,
                      config.data, tokenizer)
    page = showing.page(found, tokenizer, recipe=parsed.recipe, html=parsed.flags.html is not None,
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

    loaded, _ = load_recipe(parsed)
    preflight.check_files(loaded)
    demo.prepare([name for name in preflight.demo_names(loaded)])
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that is not UTF-8 gets question marks, not a traceback
        sys.stdout.reconfigure(errors="replace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return loaded
