"""What every rank runs: `python -m shardwise.train RECIPE [key=value ...]`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
import warnings
from typing import Literal, NoReturn

from shardwise import outcome
from shardwise.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USER, ShardwiseError
from shardwise.train import heartbeat
from shardwise.train.signals import StopRequest

KINDS: dict[int, Literal["user", "stopped"]] = {EXIT_USER: "user", EXIT_STOPPED: "stopped"}


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns its exit code (0 done, 2 user's input, 3 stopped, 1 anything else)."""
    started_at = time.time()
    words = sys.argv[1:] if argv is None else argv
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m shardwise.train RECIPE [section.key=value ...]   (one rank; see shardwise --help)")
        return EXIT_OK if words else EXIT_USER
    stop = StopRequest(started_at=started_at)
    code, message = EXIT_OK, ""
    kind: Literal["done", "user", "stopped", "failed"] = "done"
    try:
        stop.listen(rank)  # before anything takes time: a signal during loading counts too
        outcome.begin(rank, world_size)
        heartbeat.start(rank, stop)
        _quiet(rank)
        from shardwise.train.run import run

        run(words[0], words[1:], stop=stop)
    except BaseException as error:
        if stop.left_setup(error):
            _end_at_once(rank, stop.before_training())
        if not isinstance(error, ShardwiseError):
            outcome.end(rank, exit_code=EXIT_FAILURE, kind="failed", error=error)
            traceback.print_exc()
            sys.stderr.flush()
            # Not sys.exit: other ranks may be inside a collective with this one; tearing down would wait for them.
            os._exit(EXIT_FAILURE)
        code, message = error.exit_code, str(error)
        kind = KINDS.get(code, "failed")
        outcome.end(rank, exit_code=code, kind=kind, message=message, error=error if kind == "failed" else None)
        together = kind != "failed" or error.everywhere
        _print(rank, message, always=not together)
        if not together:
            os._exit(code)  # the others may be inside a collective
        # The launcher reads the outcome; a non-zero code here would make the agent print a traceback of its own.
        code = EXIT_OK if outcome.folder() else code
    outcome.end(rank, exit_code=code, kind=kind, message=message)
    _leave()
    return code


def _print(rank: int, message: str, *, always: bool = False) -> None:
    """From rank 0, or from any for what only one may have to say; a stop or a mistake is told by our launcher."""
    if always or (rank == 0 and outcome.folder() is None):
        print(f"{'' if rank == 0 else f'[rank {rank}] '}{message}", file=sys.stderr, flush=True)


def _end_at_once(rank: int, message: str) -> NoReturn:
    """Other ranks may be anywhere, and taking the process group down would wait for them."""
    outcome.end(rank, exit_code=EXIT_STOPPED, kind="stopped", message=message)
    _print(rank, message)
    os._exit(EXIT_OK if outcome.folder() else EXIT_STOPPED)


def _quiet(rank: int) -> None:
    level = logging.INFO if rank == 0 else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("shardwise").setLevel(level)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if rank != 0:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if rank == 0 else "false")
    for noisy in ("DeepSpeed", "deepspeed"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _leave() -> None:
    """Take the process group down in order, so that nothing warns about leaked ranks."""
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        with contextlib.suppress(Exception):
            torch_distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
