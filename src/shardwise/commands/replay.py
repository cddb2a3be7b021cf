"""`shardwise replay`: the first steps of a run once more, and how far they are from what it recorded."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USER, UserError

if TYPE_CHECKING:
    from shardwise.export.runs import Run

COMPARED = ("loss", "grad_norm")
DEFAULT_STEPS = 5
"""Or as many as the run recorded."""
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2}
"""Largest relative difference of loss and gradient norm that passes. On one machine and split there is none. On
another split sums are taken in another order: in fp32 that moves the seventh digit; in fp16 and bf16, with 11 and 8
bits, single products differ in the fourth and third digit, and the gradient norm shows it."""
OFFLOADED = 1e-4
"""The same in fp32 where DeepSpeed's CPU Adam stands in for torch's on one side."""
ABOUT = """Repeat the first steps of a run on this machine and compare loss and gradient norm with its metrics.jsonl.
Settings after RUN may split the work otherwise: strategy, offload, launch, batch.max_tokens_per_micro_batch."""
EPILOG = "exit codes: 0 the same within the tolerance; 1 not the same; 2 a mistake in the input"
SPLIT = ("strategy", "offload", "launch.", "batch.max_tokens_per_micro_batch", "model.attention",
         "model.gradient_checkpointing", "data.packing", "data.workers")
"""Settings that do not change the curve."""


def replay(words: list[str]) -> int:
    """`shardwise replay`: train a few steps in a temporary folder, print a table."""
    parser = argparse.ArgumentParser(prog="shardwise replay", description=ABOUT, epilog=EPILOG, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="the folder of a run (its run.output_dir)")
    parser.add_argument("settings", metavar="section.key=value", nargs="*", help="how to split the work this time")
    parser.add_argument("--steps", metavar="K", type=int, help="steps to repeat, from the first (default 5)")
    if not words:
        parser.print_usage()
        return EXIT_USER
    asked = parser.parse_intermixed_args(words)
    from shardwise.export.runs import open_run, read_metrics

    run = open_run(asked.run)
    recorded = _recorded(run, read_metrics(run.folder / "metrics.jsonl"), asked.steps)
    steps = len(recorded)
    folder = Path(tempfile.mkdtemp(prefix="shardwise-replay-"))
    try:
        _enter(run)
        code, again = _again(run, asked.settings, steps, folder)
        return code if code != EXIT_OK else _compare(run, recorded, again, asked.settings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _recorded(run: Run, lines: list[dict[str, Any]], steps: int | None) -> list[dict[str, Any]]:
    found = training_lines(lines)
    if steps is not None and steps < 1:
        raise UserError(f"--steps {steps}: repeat at least one step")
    if not found or found[0]["step"] != 1:
        raise UserError(f"{run.folder / 'metrics.jsonl'}: it does not begin with step 1, so there is nothing to "
                        "compare with; replay the run that this one went on from")
    if steps is None:
        return found[:DEFAULT_STEPS]
    if steps > len(found):
        raise UserError(f"--steps {steps}: the run recorded {len(found)} steps; ask for at most that many")
    return found[:steps]


def _enter(run: Run) -> None:
    """Paths in a recipe are relative to where the run was started."""
    if os.path.isdir(run.manifest["cwd"]):
        os.chdir(run.manifest["cwd"])


def _again(run: Run, settings: list[str], steps: int, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Train; the exit code (0: as many steps as asked) and the new training lines."""
    from shardwise import demo
    from shardwise.config.load import load
    from shardwise.export.runs import read_metrics
    from shardwise.launch import command, devices, nodes, preflight
    from shardwise.launch.run import care_for
    from shardwise.launch.run import run as start

    recipe = folder / "replay.yaml"
    recipe.write_text(_recipe(run, steps, folder / "run"), encoding="utf-8")
    loaded = load(recipe, settings)
    _refuse_other_curve(loaded.origins)
    where = nodes.world(loaded, devices.visible_gpus(os.environ, devices.physical_gpus()))
    preflight.check_files(loaded)
    demo.prepare(preflight.demo_names(loaded))
    _refuse_other_sources(run, recipe, settings, where.processes)
    port = nodes.meeting_port(loaded, where)
    node = command.commands(loaded, where, port, str(recipe), settings, os.environ, command.available_cores())[0]
    result = start(node, where, os.environ, care_for(loaded.config, os.environ))
    if result.exit_code not in (EXIT_OK, EXIT_STOPPED):
        print(result.message, file=sys.stderr)
        return result.exit_code, []
    again = training_lines(read_metrics(folder / "run" / "metrics.jsonl"))
    if len(again) < steps:
        print(f"stopped after {len(again)} of {steps} steps: {result.message}", file=sys.stderr)
        return EXIT_FAILURE, []
    return EXIT_OK, again[:steps]


def _recipe(run: Run, steps: int, folder: Path) -> str:
    """The run's settings, to be stopped after a few steps, without evaluation, tracker and checkpoints."""
    from shardwise.config.secrets import HIDDEN
    from shardwise.export.runs import as_recipe

    tree, identity = run.manifest["config"], run.manifest["identity"]
    text = as_recipe(tree | {
        "strategy": identity["strategy"], "offload": identity["offload"],
        "run": {"name": "replay", "seed": tree["run"]["seed"], "output_dir": str(folder), "stop_after": steps},
        "data": tree["data"] | {"eval": []}, "eval": {}, "tracking": {"backends": []},
        "checkpoint": {"at_end": False},
        "launch": {"processes": identity["world_size"], "timeout_minutes": tree["launch"]["timeout_minutes"]}})
    if HIDDEN in text:
        raise UserError(f"{run.folder}: a secret was left out of its manifest ({HIDDEN}), so its settings are not "
                        "whole; keep secrets in environment variables rather than in recipes")
    return text


def _refuse_other_curve(origins: dict[str, str]) -> None:
    from shardwise.config.document import COMMAND_LINE

    for key, origin in origins.items():
        if origin == COMMAND_LINE and not key.startswith(SPLIT):
            raise UserError(f"{COMMAND_LINE}: {key} changes what is computed, and a replay computes the same; leave it "
                            f"out (a replay takes {', '.join(name + '*' * name.endswith('.') for name in SPLIT)})")


def _refuse_other_sources(run: Run, recipe: Path, settings: list[str], processes: int) -> None:
    """Data and base model must be those of the run. Raises UserError naming what is not, before a model is loaded."""
    from shardwise.config.launcher import Launcher
    from shardwise.config.load import load
    from shardwise.config.resolve import resolve
    from shardwise.export.base import fingerprint
    from shardwise.train.inputs import load_inputs

    inputs = load_inputs(resolve(load(recipe, settings), world_size=processes, launcher=Launcher()))
    curve, config = run.manifest["identity"]["curve"], run.config
    faults = [f"{was['name']} has other rows, or is tokenised otherwise, than at the time of the run ({now['rows']:,} "
              f"rows, fingerprint {now['fingerprint'][:12]}...; was {was['rows']:,}, {was['fingerprint'][:12]}...)"
              for was, now in zip(run.manifest["data"]["train_sources"], inputs.sources, strict=True)
              if was["fingerprint"] != now["fingerprint"]]
    if not faults and inputs.identity["data_fingerprint"] != curve["data_fingerprint"]:
        faults = [f"the training data has another fingerprint ({inputs.identity['data_fingerprint'][:12]}...) than at "
                  f"the time of the run ({curve['data_fingerprint'][:12]}...)"]
    if config.model.path:
        name = run.manifest["base"]["path"]
        try:
            found = fingerprint(run.seen_from_start(name))["sha256"]
        except OSError as error:
            raise UserError(f"the model {name} is not there: {error}") from None
        if found != run.manifest["base"]["sha256"]:
            faults.append(f"the model {name} has other weights ({found[:12]}...) than at the time of the run "
                          f"({run.manifest['base']['sha256'][:12]}...)")
    if faults:
        raise UserError("\n".join([*faults, "a replay compares nothing but equal inputs; put them back"]))


def _compare(run: Run, recorded: list[dict[str, Any]], again: list[dict[str, Any]], settings: list[str]) -> int:
    """Print the table; 0 where the largest difference is within the tolerance, else 1."""
    tolerance = TOLERANCE[run.config.precision]
    if run.config.precision == "fp32" and (run.manifest["identity"]["offload"] != "none" or
                                           any("offload" in word for word in settings)):
        tolerance = OFFLOADED
    print(f"{'step':>6} {'loss then':>12} {'loss now':>12} {'norm then':>12} {'norm now':>12} {'difference':>12}")
    largest, where = 0.0, ""
    for was, now in zip(recorded, again, strict=True):
        apart = {key: difference(was.get(key), now.get(key)) for key in COMPARED}
        numbers = [f"{line[key]:>12.7g}" if key in line else f"{'skipped':>12}"
                   for key in COMPARED for line in (was, now)]
        print(f"{was['step']:>6} {' '.join(numbers)} {max(apart.values()):>12.2e}")
        for key, value in apart.items():
            if value > largest:
                largest, where = value, f" ({key} of step {was['step']})"
    same = largest <= tolerance
    print(f"largest relative difference {largest:.2e}{where}, allowed {tolerance:.0e} in {run.config.precision}: "
          f"{'the same curve' if same else 'NOT the same curve'}")
    return EXIT_OK if same else EXIT_FAILURE


def training_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each optimizer step, in order; of a step that was gone back over, the last."""
    found = {line["step"]: line for line in lines if "lr" in line}
    return [found[step] for step in sorted(found)]


def difference(was: float | None, now: float | None) -> float:
    """|was - now| / max(|was|, |now|); 0 where they are equal, infinite where one is not a number or is not there.

    A step that a guard skipped has neither loss nor norm.
    """
    if was == now:
        return 0.0
    if was is None or now is None:
        return math.inf
    apart = abs(was - now) / max(abs(was), abs(now))
    return math.inf if math.isnan(apart) else apart
