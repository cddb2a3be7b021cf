"""Imports run one way, and a setting that exists is a setting that is read."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest

from shardwise.config.load import LEAVES
from shardwise.data.faults import KINDS

SOURCE = Path(__file__).parents[2] / "src" / "shardwise"
# Part -> the parts it may import. What is not listed may be imported by nobody but itself.
ALLOWED = {
    "errors": set(), "config": {"errors"}, "dist": {"errors"},
    "liveness": set(), "outcome": {"errors", "liveness"}, "lock": {"errors", "liveness"},
    "demo": {"config", "errors"},
    "data": {"config", "demo", "errors"},
    "model": {"config", "data", "demo", "errors"},
    "checkpoint": {"config", "dist", "errors"},
    "export": {"checkpoint", "config", "data", "errors", "model"},
    "train": {"checkpoint", "config", "data", "demo", "dist", "errors", "export", "liveness", "lock", "model",
              "outcome"},
    "launch": {"config", "demo", "errors", "liveness", "lock", "outcome"},  # starts the rest as child processes
    "commands": {"config", "data", "demo", "errors", "export", "launch", "lock", "train"},
    "cli": {"commands", "errors"},
    "__main__": {"cli"}, "__init__": set(),
}
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "wandb", "numpy"}
LIGHT_PARTS = {"errors", "config", "liveness", "lock", "outcome", "demo", "launch", "commands", "cli", "__main__"}


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path, *, top_level_only: bool = False):
    """(line, imported module) of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "shardwise":
                yield from ((node.lineno, f"shardwise.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


@lru_cache
def attributes_read() -> frozenset[str]:
    """Names of all attributes read outside the files that only define and check settings."""
    definitions = {SOURCE / "config" / name for name in ("schema.py", "rules.py", "load.py")}
    return frozenset(node.attr for path in SOURCE.rglob("*.py") if path not in definitions
                     for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                     if isinstance(node, ast.Attribute))


def test_imports_run_one_way():
    faults = []
    for path in sorted(SOURCE.rglob("*.py")):
        own = part_of(path)
        assert own in ALLOWED, f"{path}: a part that ALLOWED does not know"
        for line, module in imports(path):
            names = module.split(".")
            if names[0] == "shardwise" and len(names) > 1:
                other = names[1] if names[1] in ALLOWED else "__init__"
                if other not in {own, "__init__"} | ALLOWED[own]:
                    faults.append(f"{path.relative_to(SOURCE.parent)}:{line} {own} -> {other}")
    assert not faults, "\n".join(faults)


def test_the_allowed_order_has_no_circle():
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {part for part, needs in ALLOWED.items() if part not in done and needs <= done}
        assert ready, f"circle among {set(ALLOWED) - done}"
        done |= ready


def test_light_parts_import_no_heavy_library_at_the_top():
    faults = [f"{path.relative_to(SOURCE.parent)}:{line} {module}"
              for path in sorted(SOURCE.rglob("*.py")) if part_of(path) in LIGHT_PARTS
              for line, module in imports(path, top_level_only=True) if module.split(".")[0] in HEAVY]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("key", sorted(LEAVES))
def test_every_setting_is_read_outside_the_schema(key):
    section, leaf = key.rsplit(".", 1) if "." in key else ("", key)
    if section == "data.on_fault":
        assert leaf in KINDS, f"there is no fault of the kind {leaf}"  # read by the name of the kind, in findings.py
        return
    assert leaf in attributes_read(), f"nothing reads {key}; a setting without an effect must go"


def test_every_fault_has_a_policy():
    policies = {key.removeprefix("data.on_fault.") for key in LEAVES if key.startswith("data.on_fault.")}
    assert policies == set(KINDS) - {"too_long"}  # data.on_too_long says what happens to those
    soft = {kind for kind in policies if "report" in str(LEAVES[f"data.on_fault.{kind}"])}
    assert soft == {kind for kind in policies if KINDS[kind].usable}


def test_data_is_read_masked_stored_dealt_out_and_looked_at_in_this_order():
    allowed = {"read": set(), "mask": set(), "store": {"read", "mask"}, "steps": {"read", "store"},
               "look": {"read", "store"}}
    faults = []
    for path in sorted((SOURCE / "data").rglob("*.py")):
        own = path.relative_to(SOURCE / "data").parts[0].removesuffix(".py")
        for line, module in imports(path):
            parts = module.split(".")
            other = parts[2] if parts[:2] == ["shardwise", "data"] and len(parts) > 2 else ""
            if other in allowed and other != own and other not in allowed.get(own, set()):
                faults.append(f"{path.relative_to(SOURCE.parent)}:{line} {own} -> {other}")
    assert not faults, "\n".join(faults)
