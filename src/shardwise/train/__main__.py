"""What every rank runs: `python -m shardwise.train RECIPE [key=value ...]`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
import warnings
from typing import Literal

from shardwise import outcome
from shardwise.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USER, ShardwiseError
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
    stop.listen()  # before anything takes time: a signal during loading counts too
    outcome.begin(rank, world_size)
    _quiet(rank)
    code, message = EXIT_OK, ""
    kind: Literal["done", "user", "stopped", "failed"] = "done"
    try:
        from shardwise.train.run import run

        run(words[0], words[1:], stop=stop)
    except ShardwiseError as error:
        code, message = error.exit_code, str(error)
        kind = KINDS.get(code, "failed")
        explained = os.environ.get(outcome.ENV) and kind != "failed"  # the launcher prints it, last
        if not explained and (rank == 0 or kind == "failed"):
            print(f"{'' if rank == 0 else f'[rank {rank}] '}{message}", file=sys.stderr, flush=True)
    except BaseException as error:
        outcome.end(rank, exit_code=EXIT_FAILURE, kind="failed", message=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        sys.stderr.flush()
        # Not sys.exit: other ranks may be inside a collective with this one, and tearing down would wait for them.
        os._exit(EXIT_FAILURE)
    outcome.end(rank, exit_code=code, kind=kind, message=message)
    _leave()
    # The launcher reads the outcome; a non-zero code here would make the agent print a traceback of its own.
    return EXIT_OK if kind in ("user", "stopped") and os.environ.get(outcome.ENV) else code


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
