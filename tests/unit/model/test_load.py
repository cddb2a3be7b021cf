"""Fresh weights belong to one seed, model and tokenizer; another start in the same folder draws its own."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from shardwise.config.launcher import Launcher
from shardwise.config.load import load
from shardwise.config.resolve import Resolved, resolve
from shardwise.model.load import draw_fresh, fresh_folder

TINY = Path(__file__).parents[3] / "recipes" / "tiny.yaml"


def resolved(folder: Path, *settings: str) -> Resolved:
    return resolve(load(TINY, [f"run.output_dir={folder}", *settings]), world_size=1, launcher=Launcher())


def test_a_killed_start_lends_no_weights_to_another_seed(tmp_path: Path) -> None:
    first, again, other = (resolved(tmp_path, f"run.seed={seed}") for seed in (0, 0, 1))
    for one in (first, again, other):
        draw_fresh(one, vocabulary=1024)
    assert fresh_folder(first) == fresh_folder(again) != fresh_folder(other)
    weights = [load_file(fresh_folder(one) / "model.safetensors")["model.embed_tokens.weight"]
               for one in (first, other)]
    assert not weights[0].equal(weights[1])
