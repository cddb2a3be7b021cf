"""A run folder as export and replay see it: its manifest, its settings, its checkpoints. Needs no torch."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint import layout
from shardwise.config.load import load
from shardwise.config.schema import Config
from shardwise.errors import CheckpointError, UserError

MANIFEST, SKELETON, RECORD = "manifest.json", "skeleton", "shardwise_export.json"


@dataclass(frozen=True)
class Run:
    """A run folder (absolute) and what it says of itself."""

    folder: Path
    manifest: dict[str, Any]
    config: Config

    @property
    def skeleton(self) -> Path:
        """What the model is but for its trained weights (skeleton.py)."""
        return self.folder / SKELETON

    def seen_from_start(self, name: str) -> str:
        """A path of the recipe, which was relative to where the run was started; hub names stay what they are."""
        there = os.path.join(self.manifest.get("cwd", ""), name)
        return there if os.path.exists(there) else name


def open_run(folder: str) -> Run:
    """A run folder by its path. Raises UserError saying what is missing."""
    path = Path(folder).absolute()
    if (path / RECORD).is_file():
        merged = read_record(path).get("merged")
        raise UserError(f"{folder} is the result of an export{', with its adapter merged already' if merged else ''}; "
                        "give the run folder it came from (the one with manifest.json and checkpoints/)")
    if not (path / MANIFEST).is_file():
        raise UserError(f"{folder} is no run folder: there is no {MANIFEST} in it; give the run.output_dir of a run, "
                        "such as runs/demo")
    manifest = read_manifest(path)
    return Run(path, manifest, config_of(manifest, path / MANIFEST))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder. Raises UserError when it cannot be read."""
    try:
        return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / MANIFEST}: cannot be read: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Replace a file as a whole, so that a crash leaves the old one or the new one."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
    os.replace(beside, path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics file; a last line cut by a crash is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def read_record(folder: Path) -> dict[str, Any]:
    """What an exported folder says of itself; empty when it is none."""
    try:
        return dict(json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def as_recipe(tree: dict[str, Any]) -> str:
    """A recipe file (YAML) with every setting of a resolved config."""
    return json.dumps(tree, indent=1, ensure_ascii=False)


def config_of(manifest: dict[str, Any], place: Path) -> Config:
    """The settings a manifest records. Raises UserError for those of another version of shardwise."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(as_recipe(manifest.get("config", {})), encoding="utf-8")
        try:
            return load(recipe).config
        except UserError as error:
            raise UserError(f"{place}: its settings cannot be used by this version of shardwise:\n{error}") from None


def choose_checkpoint(run: Run, wanted: str | None) -> Path:
    """The checkpoint of a step number or path; the newest complete one when not said. Raises CheckpointError."""
    root = run.folder / "checkpoints"
    if wanted is None:
        newest = layout.latest(root)
        if newest is None:
            raise CheckpointError(f"{root}: no complete checkpoint there; train until one is saved, or give one with "
                                  "--checkpoint PATH")
        return newest
    folder = root / layout.folder_name(int(wanted)) if wanted.isdecimal() else Path(wanted).absolute()
    if not (folder / layout.META).is_file():
        have = ", ".join(str(int(path.name.removeprefix("step-"))) for path in layout.complete(root)) or "none"
        raise CheckpointError(f"--checkpoint {wanted}: no complete checkpoint at {folder}; complete ones in this run: "
                              f"{have}")
    return folder
