"""How many GPUs this machine offers, found without importing torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import PreflightError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")
WAIT_SECONDS = 20
UUID = re.compile(r"(GPU|MIG)-\S+")


def visible_gpus(env: Mapping[str, str], physical: int | None = None) -> int:
    """GPUs that processes started with `env` will see; `physical` is how many there are, None if unknown.

    Raises PreflightError for a CUDA_VISIBLE_DEVICES that names a GPU twice, one that is not there, or none at all.
    """
    listed = env.get(VISIBLE)
    if listed is None:
        return physical or 0
    names = [name.strip() for name in listed.split(",")]
    if "-1" in names:  # CUDA reads the list up to here
        names = names[:names.index("-1")]
    if names in ([""], []):
        return 0
    for place, name in enumerate(names):
        _check(name, names[:place], listed, physical)
    return len(names)


def _check(name: str, before: list[str], listed: str, physical: int | None) -> None:
    if name in before:
        raise PreflightError(f"{VISIBLE}={listed} names GPU {name} twice; name each GPU once")
    if UUID.fullmatch(name):
        return
    if not name.isdecimal():
        raise PreflightError(f"{VISIBLE}={listed}: {name!r} is not a GPU; list indices (0,1) or GPU-... names")
    if physical is not None and int(name) >= physical:
        have = f"has {physical} GPU{'s' * (physical > 1)} (0 to {physical - 1})" if physical else "has no GPU"
        raise PreflightError(f"{VISIBLE}={listed} names GPU {name}, but this machine {have}; change or unset it")


def physical_gpus(driver: Path = DRIVER) -> int:
    """NVIDIA GPUs in this machine or container; 0 without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=WAIT_SECONDS, check=True)
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
        except (OSError, subprocess.SubprocessError):
            pass  # the tool without its driver, or a driver that does not answer
    return len(list(driver.iterdir())) if driver.is_dir() else 0
