"""DeepSpeed's compiled CPU kernels, built once and before anything depends on them.

torch guards a build with a plain file that outlives a killed process, after which every later start waits for
it for ever. Here one process builds under a lock that dies with its holder, and clears that file first.
Run as `python -m shardwise.train.ops` to build them ahead of time (the set-up script does).
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from shardwise.config.resolve import Resolved
from shardwise.errors import PreflightError

CPU_ADAM, CPU_COMM = "CPUAdamBuilder", "ShareMemCommBuilder"


def needed(resolved: Resolved) -> list[str]:
    """Kernels a run needs: shared-memory collectives for ZeRO without a GPU, CPU Adam under offload."""
    names = []
    if resolved.deepspeed is not None and not torch.cuda.is_available():
        names.append(CPU_COMM)
    if resolved.offload != "none" and resolved.config.optim.name == "adamw":
        names.append(CPU_ADAM)
    return names


def build(names: list[str]) -> None:
    """Build what is not built yet; every rank may call it. Raises PreflightError with the compiler's words."""
    if not names:
        return
    from torch.utils.cpp_extension import _get_build_directory

    for name in names:
        builder = _builder(name)
        folder = Path(_get_build_directory(builder.name, False))
        with FileLock(folder.with_name(f"{builder.name}.shardwise.lock")):
            (folder / "lock").unlink(missing_ok=True)
            output = io.StringIO()
            try:
                with contextlib.redirect_stdout(output):
                    builder.load(verbose=False)
            except Exception as error:  # torch, ninja and DeepSpeed each raise their own
                cause = (output.getvalue() + str(error)).strip().splitlines()
                raise PreflightError(
                    f"DeepSpeed's {builder.name} could not be compiled: {' | '.join(cause[-6:])[:1500]}. "
                    "It needs a C++ compiler (apt-get install g++ ninja-build, or set CXX)"
                    + ("; or train with offload=none" if name == CPU_ADAM else "; or train with strategy=ddp")
                ) from None


def _builder(name: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.accelerator import get_accelerator

        return get_accelerator().create_op_builder(name)


if __name__ == "__main__":
    try:
        build([CPU_COMM, CPU_ADAM] if not torch.cuda.is_available() else [])
    except PreflightError as error:
        sys.exit(f"{error}")
