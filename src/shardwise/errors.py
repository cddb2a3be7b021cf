"""What can go wrong, by whose hand, and the exit code each becomes.

Exit codes: 0 done; 2 the user's input; 3 stopped on request with a complete checkpoint; 1 anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_OK, EXIT_FAILURE, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 3


class ShardwiseError(Exception):
    """A failure that is explained in words: printed without a traceback, then `exit_code`."""

    exit_code = EXIT_FAILURE
    everywhere = False
    """True when all ranks raise it together, so that none waits for another that is gone."""


class UserError(ShardwiseError):
    """The user's input is at fault; nothing was trained and nothing was lost."""

    exit_code = EXIT_USER


class ConfigError(UserError):
    """One or more faults in a recipe or its overrides, each with its place and the way out."""

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class DataError(UserError):
    """A row, file or template that cannot be trained on as asked; names FILE:LINE."""


class PreflightError(UserError):
    """The machine or the launcher does not offer what the recipe asks for."""


class LaunchError(ShardwiseError):
    """Ranks could not be started, or one of them died."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, or does not belong to this run."""


class SaveError(ShardwiseError):
    """A checkpoint or the final model could not be written; earlier ones are intact."""

    everywhere = True


class TrainingError(ShardwiseError):
    """Training cannot go on (a non-finite loss, for example); the last checkpoint is intact."""

    everywhere = True


class OutOfMemory(ShardwiseError):
    """A rank ran out of memory where the others could not be told; a new start goes on with smaller micro-batches."""

    opening = "out of memory in step"
    """How its message begins; the launcher, which sees nothing but the message, knows it by that."""


class Stopped(ShardwiseError):
    """Stopped on request (signal, time limit, `run.stop_after`) after a complete checkpoint."""

    exit_code = EXIT_STOPPED
