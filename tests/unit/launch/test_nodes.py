"""Processes over machines (B69, B72)."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config.load import Loaded, load
from shardwise.errors import ConfigError, PreflightError
from shardwise.launch.nodes import meeting_port, world


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: org/name}\ndata: {train: [a.jsonl]}\n")
    return path


def loaded(recipe: Path, words: str) -> Loaded:
    return load(recipe, words.split())


TWO = "launch.nodes=2 launch.main_address=a "


@pytest.mark.parametrize(("words", "gpus", "processes", "per_node"), [
    ("", 0, 1, 1), ("", 8, 8, 8), ("launch.processes=2", 0, 2, 2), ("launch.processes=3", 8, 3, 3),
    ("launch.cpu_processes=2", 0, 2, 2), ("launch.cpu_processes=2", 4, 4, 4),
    (TWO, 8, 16, 8), (TWO + "launch.processes=16", 8, 16, 8), (TWO + "launch.cpu_processes=3", 0, 6, 3),
    ("launch.processes=5", 0, 5, 5)])
def test_b72_processes_are_a_total(recipe: Path, words: str, gpus: int, processes: int, per_node: int) -> None:
    where = world(loaded(recipe, words), gpus)
    assert (where.processes, where.per_node) == (processes, per_node)


def test_b72_first_rank_of_a_node(recipe: Path) -> None:
    where = world(loaded(recipe, TWO + "launch.processes=16 launch.node_rank=1"), 8)
    assert where.first_rank == 8


@pytest.mark.parametrize(("words", "gpus", "numbers"), [
    ("launch.processes=4", 2, ["launch.processes=4", "2 GPUs are", "at most 2"]),
    (TWO + "launch.processes=16", 4, ["8 per node", "4 GPUs", "at most 8"]),
    ("launch.processes=2", 1, ["2 per node", "1 GPU is"])])
def test_b69_more_processes_than_gpus(recipe: Path, words: str, gpus: int, numbers: list[str]) -> None:
    with pytest.raises(PreflightError) as caught:
        world(loaded(recipe, words), gpus)
    assert all(number in str(caught.value) for number in numbers)


@pytest.mark.parametrize(("words", "said"), [
    (TWO + "launch.processes=15", "nearest: 14 or 16"),
    (TWO + "launch.node_rank=2", "count from 0 to 1"),
    ("launch.nodes=2", "launch.main_address is not set"),
    ("launch.node_rank=1", "launch.nodes=1")])
def test_b72_refused_by_the_config(recipe: Path, words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(recipe, words)


def hosts(tmp_path: Path, text: str) -> str:
    (tmp_path / "hosts").write_text(text)
    return f"launch.hostfile={tmp_path / 'hosts'} launch.nodes=2 launch.processes=16"


def test_b72_hostfile_gives_the_address(recipe: Path, tmp_path: Path) -> None:
    words = hosts(tmp_path, "# rack 1\nalpha slots=8\n\nbeta  slots=8  # new\n")
    where = world(loaded(recipe, words), 8)
    assert (where.main_address, where.hosts) == ("alpha", ("alpha", "beta"))
    assert world(loaded(recipe, words + " launch.main_address=gamma"), 8).main_address == "gamma"


@pytest.mark.parametrize(("text", "said"), [
    ("alpha slots=8\nbeta slots=4\n", r"hosts:2: beta has slots=4.* 8 processes per node"),
    ("alpha slots=8\n", "1 hosts, but launch.nodes=2"),
    ("alpha slots=8\nbeta\n", r"hosts:2: 'beta' is not `HOST slots=N`")])
def test_b72_hostfile_disagrees(recipe: Path, tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        world(loaded(recipe, hosts(tmp_path, text)), 8)


def test_hostfile_missing(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        world(loaded(recipe, "launch.hostfile=none.txt launch.nodes=2"), 8)


@pytest.mark.parametrize(("words", "free", "port"), [
    ("", True, 4711), ("launch.main_port=80", True, 80),
    (TWO, True, 29500), (TWO + "launch.main_port=99", True, 99),
    (TWO + "launch.node_rank=1", False, 29500)])  # another machine's port is not ours to try
def test_port(recipe: Path, words: str, free: bool, port: int) -> None:
    config = loaded(recipe, words)
    assert meeting_port(config, world(config, 0), lambda: 4711, lambda number: free) == port


@pytest.mark.parametrize("words", ["launch.main_port=80", TWO, TWO + "launch.main_port=80"])
def test_busy_port_is_refused_with_a_way_out(recipe: Path, words: str) -> None:
    config = loaded(recipe, words)
    with pytest.raises(ConfigError, match=r"launch.main_port=\d+ is in use on this machine; \w+"):
        meeting_port(config, world(config, 0), lambda: 4711, lambda number: False)
