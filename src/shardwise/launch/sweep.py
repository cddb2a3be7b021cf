"""What a wandb agent changes: each of its trials gets a run folder of its own."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.config.load import Loaded


def overrides(loaded: Loaded, env: Mapping[str, str]) -> list[str]:
    """`run.output_dir=runs/NAME/sweep-ID/TRIAL` under `wandb agent`, unless the run folder is already set.

    The launcher adds it to every rank's command line, so all ranks (and the shown origins) agree.
    """
    sweep, trial = env.get("WANDB_SWEEP_ID"), env.get("WANDB_RUN_ID")
    if not sweep or not trial or loaded.origins["run.output_dir"] != "default":
        return []
    return [f"run.output_dir={loaded.config.run.output_dir}/sweep-{sweep}/{trial}"]
