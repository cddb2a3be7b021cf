"""What `accelerate launch` decided, and whether the recipe agrees."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config.launcher import Launcher, from_environment
from shardwise.config.load import load
from shardwise.config.resolve import Resolved, resolve
from shardwise.errors import ConfigError

MP = {"ACCELERATE_MIXED_PRECISION": "no"}
DS = MP | {"ACCELERATE_USE_DEEPSPEED": "true"}
ROOT = Path(__file__).parents[3]


def test_torchrun_and_our_own_launcher_decide_nothing() -> None:
    assert from_environment({}) == Launcher()
    assert from_environment(DS | {"SHARDWISE_LAUNCHED": "1"}) == Launcher()


@pytest.mark.parametrize(("env", "strategy", "offload"), [
    (MP, "ddp", "none"), (DS, "zero2", "none"), (DS | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero1", "none"),
    (DS | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "zero2", "optimizer"),
    (DS | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / "ds_configs/zero3.json")}, "zero3", "none"),
    (DS | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / "ds_configs/zero3_offload.json")}, "zero3", "params")])
def test_accelerates_choice(env: dict[str, str], strategy: str, offload: str) -> None:
    launcher = from_environment(env)
    assert (launcher.strategy, launcher.offload) == (strategy, offload)


@pytest.mark.parametrize(("env", "said"), [
    (MP | {"ACCELERATE_USE_FSDP": "true"}, "FSDP"), (MP | {"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron"),
    (MP | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps=4"),
    (DS | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "stage 0"),
    (DS | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "none.json"}, "none.json does not exist"),
    (DS | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / "pyproject.toml")}, "not a DeepSpeed configuration")])
def test_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_environment(env)


def resolved(tmp_path: Path, words: list[str], launcher: Launcher) -> Resolved:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: a}\ndata: {train: [a.jsonl]}\n")
    return resolve(load(path, words), world_size=2, launcher=launcher)


def test_auto_follows_the_launcher(tmp_path: Path) -> None:
    assert resolved(tmp_path, [], Launcher()).strategy == "ddp"
    found = resolved(tmp_path, [], Launcher(strategy="zero3", offload="params"))
    assert (found.strategy, found.offload, found.gradient_checkpointing) == ("zero3", "params", True)


@pytest.mark.parametrize(("words", "launcher", "said"), [
    (["strategy=zero2"], Launcher(strategy="ddp", offload="none"), "strategy=zero2 contradicts the launcher"),
    (["offload=optimizer"], Launcher(strategy="zero2", offload="none"),
     "offload=optimizer contradicts the launcher"),
    (["offload=optimizer"], Launcher(), "needs strategy zero1")])
def test_disagreement_is_refused(tmp_path: Path, words: list[str], launcher: Launcher, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolved(tmp_path, words, launcher)
