"""A run stopped and gone on with equals the run that was never stopped, to the last bit, at the same split."""

from __future__ import annotations

import pytest

from dist.harness import spawn

SPLITS = {"ddp": ["strategy=ddp"], "zero1": ["strategy=zero1"], "zero2": ["strategy=zero2"],
          "zero3": ["strategy=zero3"], "zero3-offload": ["strategy=zero3", "offload=params"],
          "zero1-bf16": ["strategy=zero1", "precision=bf16"],
          "zero3-bf16": ["strategy=zero3", "precision=bf16"],
          "zero2-bf16": ["strategy=zero2", "precision=bf16"], "ddp-bf16": ["strategy=ddp", "precision=bf16"]}
DROPOUT = 'model.from_config={model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, ' \
          'num_attention_heads: 2, num_key_value_heads: 2, attention_dropout: 0.1, tie_word_embeddings: true}'
# Few examples to a step, which still make several micro-batches on each rank.
COMMON = ["batch.examples_per_step=6", "batch.max_tokens_per_micro_batch=400", "checkpoint.every_steps=2",
          "data.max_length=400"]


LORA = ["adapter.kind=lora", "adapter.rank=4", "adapter.dropout=0.1", "adapter.modules_to_save=[norm]",
        "model.from_config=null"]
ADAPTERS = {"ddp-lora": ["strategy=ddp"], "zero2-lora": ["strategy=zero2"], "zero3-lora": ["strategy=zero3"],
            "ddp-lora-bf16": ["strategy=ddp", "precision=bf16"],
            "zero2-lora-bf16": ["strategy=zero2", "precision=bf16"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    spawn("dist.bodies_resume:publish", world_size=1, folder=folder, timeout_s=60, args={
        "runs": {"base": [*COMMON, "schedule.max_steps=1"]}})
    runs = {name: [*COMMON, *split] for name, split in SPLITS.items()}
    runs |= {name: [*COMMON, *LORA, *split, f"model.path={folder}/base/final"] for name, split in ADAPTERS.items()}
    runs["ddp-dropout"] = [*COMMON, "strategy=ddp", DROPOUT]
    runs["zero2-dropout"] = [*COMMON, "strategy=zero2", DROPOUT]
    found = spawn("dist.bodies_resume:straight_and_resumed", world_size=2, args={"runs": runs},
                  folder=tmp_path_factory.mktemp("resume"), timeout_s=240)
    return found[0]


@pytest.mark.parametrize("name", [*SPLITS, *ADAPTERS, "ddp-dropout", "zero2-dropout"])
def test_b35_resumed_equals_straight(results, name):
    run = results[name]
    assert run["start_step"] == 3
    assert run["ended"].startswith("stopped after step 3 of 6")
    assert run["resumed"] == run["straight"]  # losses, norms, learning rates, counts: exactly
    assert [line["step"] for line in run["resumed"] if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert run["tensors"] > 10 and run["unequal"] == []


def test_dropout_is_really_on(results):
    assert results["ddp-dropout"]["straight"] != results["ddp"]["straight"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    base = [*COMMON, "schedule.max_steps=2", "checkpoint.every_steps=1"]
    spawn("dist.bodies_resume:publish", world_size=1, args={"runs": {"base": base}}, folder=tmp_path, timeout_s=60)
    again = [*base, f"run.output_dir={tmp_path}/base"]
    first = tmp_path / "base" / "checkpoints" / "step-00000001"
    messages = spawn("dist.bodies_resume:refused", world_size=1, folder=tmp_path, timeout_s=60, args={"runs": {
        "other-lr": [*again, "optim.lr=1e-4"],
        "never": [*again, "checkpoint.resume=never"],
        "no-such": [*again, f"checkpoint.resume={tmp_path}/nothing"],
        "older": [*again, f"checkpoint.resume={first}"],
        "other-strategy": [*again, "strategy=zero2"],
        "other-micro-batch": [*again, "batch.max_tokens_per_micro_batch=700"]}})[0]
    assert "optim was" in messages["other-lr"] and "Choose another run.output_dir" in messages["other-lr"]
    assert "checkpoint.resume=never, but" in messages["never"]
    assert "no complete checkpoint there" in messages["no-such"]
    assert f"checkpoint.resume={first} is of step 1, but" in messages["older"]
    assert messages["other-strategy"] == messages["other-micro-batch"] == ""  # the curve goes on, however it is split
