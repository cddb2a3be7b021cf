"""The weights a run started from: where they lie, and a fingerprint that tells them from any others."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.data.tokenizer import place_of

WHOLE_BYTES = 256 * 2**20
"""Up to this size every byte of a file is read."""
BLOCKS, BLOCK_BYTES = 64, 2**20
"""Of a larger file: its header, and this many blocks spread evenly from its first to its last byte."""
RULE = ("sha256 of names, sizes and contents of the weight files; of a file over 256 MiB the safetensors header and "
        "64 blocks of 1 MiB spread evenly")


def weight_files(name: str) -> list[Path]:
    """The weight files of a model folder, a .gguf file or a hub name that was loaded before; sorted by name.

    Raises OSError when nothing of it lies on this machine.
    """
    place = place_of(name)
    if "gguf_file" in place:
        return [Path(name)]
    folder = Path(name)
    if not folder.is_dir():
        from transformers.utils import cached_file

        folder = Path(str(cached_file(name, "config.json", local_files_only=True))).parent
    for pattern in ("*.safetensors", "*.bin"):
        if found := sorted(folder.glob(pattern)):
            return found
    raise FileNotFoundError(f"{folder}: no weight files (.safetensors, .bin) there")


def fingerprint(name: str) -> dict[str, Any]:
    """`sha256` of the weights by RULE, `bytes` in all and the number of `files`. Raises OSError."""
    files = weight_files(name)
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name} {path.stat().st_size} {_digest(path)}\n".encode())
    return {"sha256": whole.hexdigest(), "bytes": sum(path.stat().st_size for path in files), "files": len(files),
            "rule": RULE}


def _digest(path: Path) -> str:
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256(_header(file, size))
        for block in range(BLOCKS):
            file.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
            found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()


def _header(file: BinaryIO, size: int) -> bytes:
    """Of a safetensors file: names, dtypes, shapes and places of all tensors. Of another one its first block."""
    length = int.from_bytes(file.read(8), "little")
    return file.read(length if length < size else BLOCK_BYTES)


def quantisation(name: str) -> str | None:
    """How the weights of a local model folder are quantised (`bitsandbytes`, ...); None when they are not."""
    from transformers import AutoConfig

    place = place_of(name)
    if "gguf_file" in place:
        return None  # transformers turns these into plain weights, which is what was trained on
    path = Path(name) / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else \
        AutoConfig.from_pretrained(name, local_files_only=True).to_dict()
    found = fields.get("quantization_config")
    return None if found is None else str(found.get("quant_method", "an unnamed method"))
