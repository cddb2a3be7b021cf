"""The `shardwise` command: dispatch, and turn a user's mistake into words and an exit code.

Everything heavier than argparse is imported by the command that needs it; torch by none.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence

from shardwise import __version__
from shardwise.commands.data import data
from shardwise.commands.export import export
from shardwise.commands.replay import replay
from shardwise.commands.run import config, train
from shardwise.commands.words import SETTINGS
from shardwise.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER, ShardwiseError, UserError

COMMANDS: dict[str, Callable[[list[str]], int]] = {"train": train, "config": config, "data": data, "export": export,
                                                  "replay": replay}


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
        "  export   a run's checkpoint as a Hugging Face folder, adapter merged or not, without a GPU",
        "  replay   repeat the first steps of a run and compare losses and gradient norms",
        "", "shardwise COMMAND --help says more; shardwise --version tells the version.", SETTINGS])


if __name__ == "__main__":
    sys.exit(main())
