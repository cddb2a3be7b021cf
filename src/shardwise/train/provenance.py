"""manifest.json: what made a run (code, versions, machine, data, weights, settings), and every start of it."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from shardwise import __version__
from shardwise.config.resolve import Resolved, as_tree
from shardwise.config.secrets import SECRET, hide
from shardwise.config.shipped import PACKAGE
from shardwise.export.runs import MANIFEST, read_manifest, write_json
from shardwise.train.inputs import Inputs

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "wandb")
# What the curve depends on; a checkpoint made with other values does not belong to this run.
NOT_CURVE = ("train", "eval", "packing", "on_fault", "workers")  # of data: the rows' fingerprint covers what matters
CURVE = ("model", "adapter", "data", "optim", "schedule", "precision")
PER_START = ("started", "host", "cwd", "command", "git", "python", "packages", "hardware", "environment")
"""What may differ from one start of a run to the next, and is kept of each."""
ENVIRONMENT = re.compile(r"CUDA_|NVIDIA_|NCCL_|GLOO_|TORCH_|PYTORCH_|OMP_|MKL_|CUBLAS_|DS_|DEEPSPEED_|TRANSFORMERS_|"
                         r"SHARDWISE_(CACHE|LAUNCHED|WORLD_SIZE)\Z|HF_(HOME|HUB_OFFLINE|DATASETS_OFFLINE)\Z|WANDB_(MODE|PROJECT|SWEEP_ID)\Z|"
                         r"SLURM_(JOB_ID|JOB_NAME|NNODES|NTASKS|RESTART_COUNT|JOB_PARTITION)\Z|MASTER_ADDR\Z")
"""Variables that can change what is computed or how fast."""


def manifest(resolved: Resolved, inputs: Inputs) -> dict[str, Any]:
    """What made this run, without any secret, and the identity a resume must share."""
    tree = as_tree(resolved.config)
    identity: dict[str, Any] = {key: tree[key] for key in CURVE}
    # Where and how work is split may differ between sessions of one run; what is computed may not.
    identity["model"] = {k: v for k, v in tree["model"].items() if k not in ("attention", "gradient_checkpointing")}
    identity["data"] = {k: v for k, v in tree["data"].items() if k not in NOT_CURVE}
    identity |= {"seed": resolved.config.run.seed, **inputs.identity,
                 "examples_per_step": resolved.config.batch.examples_per_step}
    held_out = inputs.held_out
    facts = {
        "identity": {"curve": identity, "strategy": resolved.strategy, "offload": resolved.offload,
                     "world_size": resolved.world_size},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "host": socket.gethostname(),
        "cwd": os.getcwd(), "command": sys.argv[1:], "git": git_state(), "python": platform.python_version(),
        "packages": {"shardwise": __version__, **{name: version(name) for name in PACKAGES}},
        "hardware": hardware(), "environment": environment(os.environ),
        "data": {"train": inputs.counts, "train_sources": inputs.sources,
                 "eval": None if held_out is None else held_out.counts, "eval_sources": inputs.held_out_sources,
                 "eval_fingerprint": None if held_out is None else held_out.fingerprint},
        "config": tree, "deepspeed": resolved.deepspeed,
    }
    clean: dict[str, Any] = hide(facts, os.environ)
    return clean


def record_start(folder: Path, facts: dict[str, Any], *, from_step: int) -> None:
    """Write manifest.json: the facts of the start that made step 1, and a line of history for every start."""
    folder.mkdir(parents=True, exist_ok=True)
    before = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
    session = {key: facts[key] for key in PER_START} | \
        {key: facts["identity"][key] for key in ("strategy", "offload", "world_size")} | {"from_step": from_step}
    if before:
        session["changed"] = _changed(before["config"], facts["config"])
    first = before if before and from_step > 0 else facts
    write_json(folder / MANIFEST, {**first, "sessions": [*before.get("sessions", []), session]})


def record_end(folder: Path, step: int) -> None:
    """Say in manifest.json at which step the run was finished."""
    write_json(folder / MANIFEST, {**read_manifest(folder), "finished_step": step})


def _changed(was: Any, now: Any, key: str = "") -> dict[str, Any]:
    """Dotted key -> [value at the first start, value now] of the settings that differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        return {name: pair for inner in sorted(set(was) | set(now))
                for name, pair in _changed(was.get(inner), now.get(inner), f"{key}.{inner}".strip(".")).items()}
    return {} if was == now else {key: [was, now]}


def git_state() -> dict[str, Any] | None:
    """Commit and dirtiness of the checkout shardwise runs from; None outside one."""
    try:
        sha, changes = (subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True,
                                       check=True, timeout=10).stdout.strip()
                        for words in (["rev-parse", "HEAD"], ["status", "--porcelain"]))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"sha": sha, "dirty": bool(changes)}


def hardware() -> dict[str, Any]:
    """Processor, memory and GPUs of this machine, and the drivers beneath them; None for what cannot be found."""
    on_gpu = torch.cuda.is_available()
    return {"machine": platform.machine(), "system": platform.platform(), "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": [{"name": torch.cuda.get_device_name(i),
                      "memory_gib": round(torch.cuda.get_device_properties(i).total_memory / 2**30, 1)}
                     for i in range(torch.cuda.device_count())],
            "cuda": torch.version.cuda, "driver": _found(r"Kernel Module\D*([\d.]+)", "/proc/driver/nvidia/version"),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None}


def _cpu_model() -> str:
    return _found(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.processor()


def _found(pattern: str, path: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1].strip() if match else None


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter, by name; none whose name sounds like a secret."""
    return {name: env[name] for name in sorted(env) if ENVIRONMENT.match(name) and not SECRET.search(name)}
