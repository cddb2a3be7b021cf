"""`shardwise train` and `shardwise config`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.commands.words import load_recipe, parse
from shardwise.errors import EXIT_FAILURE, EXIT_OK

if TYPE_CHECKING:
    from shardwise.config.load import Loaded
    from shardwise.launch.nodes import World


def train(words: list[str]) -> int:
    """`shardwise train`: check, then start the ranks and wait for them."""
    parsed = parse("train", "Start a recipe.", words, {
        "--dry-run": "prepare everything, print the exact commands and the arithmetic, start nothing"})
    from shardwise import demo
    from shardwise.launch import command, nodes, preflight, sweep

    loaded, overrides = load_recipe(parsed)
    env = dict(os.environ)
    extra = sweep.overrides(loaded, env)
    if extra:
        overrides = [*overrides, *extra]
        loaded, _ = load_recipe(parsed._replace(overrides=overrides))
    where = _world(loaded)
    arithmetic = _arithmetic(loaded, where)
    preflight.check_files(loaded)
    port = nodes.meeting_port(loaded, where)
    commands = command.commands(loaded, where, port, parsed.recipe, overrides, env, command.available_cores())
    demo.prepare(preflight.demo_names(loaded))
    if parsed.flags.dry_run:
        for one in commands:
            print(command.printed(one, nodes=where.nodes, folder=Path.cwd()))
        print(arithmetic)
        return EXIT_OK
    from shardwise.launch.run import care_for, run

    meeting = f"{where.main_address}:{port}" if where.nodes > 1 else ""
    result = run(commands[where.node_rank], where, env, care_for(loaded.config, env, meeting))
    if result.message:
        # A rank that was killed leaves its progress bar without an end of line.
        print("\n" * (result.exit_code == EXIT_FAILURE) + result.message, file=sys.stderr, flush=True)
    return result.exit_code


def config(words: list[str]) -> int:
    """`shardwise config`: the resolved settings, as text or JSON."""
    parsed = parse("config", "Show every setting of a recipe and where it came from.", words,
                    {"--json": "print one JSON object"})
    from shardwise.config import show
    from shardwise.config.launcher import Launcher
    from shardwise.config.resolve import resolve

    loaded, _ = load_recipe(parsed)
    resolved = resolve(loaded, world_size=_world(loaded).processes, launcher=Launcher())
    print(show.as_json(resolved) if parsed.flags.json else show.text(resolved))
    return EXIT_OK


def _world(loaded: Loaded) -> World:
    from shardwise.launch import devices, nodes

    return nodes.world(loaded, devices.visible_gpus(os.environ, devices.physical_gpus()))


def _arithmetic(loaded: Loaded, where: World) -> str:
    """The arithmetic line; resolving also finds contradictions that only show with the number of ranks."""
    from shardwise.config import show
    from shardwise.config.launcher import Launcher
    from shardwise.config.resolve import resolve

    return show.arithmetic(resolve(loaded, world_size=where.processes, launcher=Launcher()))
