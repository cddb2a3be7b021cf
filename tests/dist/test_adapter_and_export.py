"""LoRA trains the same in every strategy; what a run hands back is what it trained."""

from __future__ import annotations

import json

import pytest
import torch

from dist.harness import spawn
from shardwise.export.offline import Wish, export
from shardwise.export.runs import open_run

STRATEGIES = {"ddp": ["strategy=ddp"], "zero1": ["strategy=zero1"], "zero2": ["strategy=zero2"],
              "zero3": ["strategy=zero3"], "zero3-offload": ["strategy=zero3", "offload=params"]}
LORA = ["adapter.kind=lora", "adapter.rank=4", "schedule.max_steps=4", "batch.max_tokens_per_micro_batch=512"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Full fine-tunes in every strategy, fp32 and bf16: their final/ folders."""
    folder = tmp_path_factory.mktemp("published")
    runs = {f"{name}-{precision}": [*split, f"precision={precision}", "schedule.max_steps=2"]
            for name, split in STRATEGIES.items() for precision in ("fp32", "bf16")}
    ended = spawn("dist.bodies_resume:publish", world_size=2, args={"runs": runs}, folder=folder, timeout_s=180)
    assert set(ended[0].values()) == {"done"}
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_final_folder_gives_the_live_models_logits(published, strategy, precision):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = published / f"{strategy}-{precision}" / "final"
    check = json.loads((final / "shardwise_check.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(final, dtype="auto")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([check["input_ids"]]), use_cache=False).logits[0, -1].float()
    torch.testing.assert_close(logits, torch.tensor(check["logits"]), rtol=0, atol=1e-5)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # tied: one storage
    reference = AutoModelForCausalLM.from_config(model.config)
    assert {name: p.shape for name, p in model.named_parameters()} == \
        {name: p.shape for name, p in reference.named_parameters()}  # B39: no weight of size 0
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False,
                                         add_generation_prompt=True) == \
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_b52_every_rank_takes_part_and_one_writes(published, strategy):
    run = published / f"{strategy}-fp32"
    assert sorted(path.name for path in (run / "final").iterdir()) == [
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "shardwise_check.json", "shardwise_export.json", "tokenizer.json", "tokenizer_config.json"]
    assert not list(run.rglob("*.part"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_b39_an_export_of_the_last_checkpoint_is_final_to_the_last_bit(published, tmp_path, strategy, precision):
    run = published / f"{strategy}-{precision}"
    folder, said = export(open_run(str(run)), Wish(output=str(tmp_path / "exported")))
    assert said == []
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json",
                 "chat_template.jinja"):
        assert (folder / name).read_bytes() == (run / "final" / name).read_bytes(), name
    live, back = (json.loads((place / "shardwise_check.json").read_text()) for place in (run / "final", folder))
    assert live["input_ids"] == back["input_ids"] and (live["of"], back["of"]) == ("live", "export")
    torch.testing.assert_close(torch.tensor(back["logits"]), torch.tensor(live["logits"]), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def lora(published, tmp_path_factory):
    base = published / "ddp-fp32" / "final"
    runs = {name: [*LORA, *split, f"model.path={base}"] for name, split in STRATEGIES.items()}
    folder = tmp_path_factory.mktemp("lora")
    return base, folder, spawn("dist.bodies_resume:adapters", world_size=2, args={"runs": runs}, folder=folder,
                               timeout_s=120)[0]


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "ddp"])
def test_lora_curve_is_the_same_in_every_strategy(lora, strategy):
    bound = 1e-4 if "offload" in strategy else 1e-5
    for ours, reference in zip(lora[2][strategy]["metrics"], lora[2]["ddp"]["metrics"], strict=True):
        for key, value in reference.items():
            assert ours[key] == pytest.approx(value, rel=bound), (key, reference["step"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exported_adapter_is_that_of_final_and_merged_it_gives_the_live_logits(lora, tmp_path, strategy):
    from transformers import AutoModelForCausalLM

    run = open_run(str(lora[1] / strategy))
    adapter, _ = export(run, Wish(output=str(tmp_path / "adapter")))
    final = run.folder / "final"
    assert (adapter / "adapter_model.safetensors").read_bytes() == (final / "adapter_model.safetensors").read_bytes()
    ours, finals = (json.loads((place / "adapter_config.json").read_text()) for place in (adapter, final))
    assert set(ours.pop("target_modules")) == set(finals.pop("target_modules"))  # PEFT writes a set, in any order
    assert ours == finals
    merged, _ = export(run, Wish(output=str(tmp_path / "merged"), merge_lora=True))
    check = json.loads((run.folder / "final" / "shardwise_check.json").read_text())
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")(
            input_ids=torch.tensor([check["input_ids"]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, torch.tensor(check["logits"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lora_saves_the_adapter_only_and_plain_peft_loads_it(lora, strategy):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, folder, results = lora
    shapes = results[strategy]["shapes"]
    assert len(shapes) == 2 * 7 * 2  # A and B, seven targets, two layers
    assert all("lora_" in name and min(shape) > 0 for name, shape in shapes.items())
    base_bytes = (base / "model.safetensors").stat().st_size
    assert results[strategy]["checkpoint_bytes"] < base_bytes  # adapter and its moments, no base weights
    final = folder / strategy / "final"
    check = json.loads((final / "shardwise_check.json").read_text())
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(final))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([check["input_ids"]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, torch.tensor(check["logits"]), rtol=0, atol=1e-5)


def test_a_target_that_matches_nothing_is_refused_even_when_others_match(published, tmp_path):
    base = published / "ddp-fp32" / "final"
    message = spawn("dist.bodies_resume:refused", world_size=1, folder=tmp_path, timeout_s=60, args={"runs": {
        "typo": [*LORA, f"model.path={base}", "adapter.targets=[q_proj, v_projj]",
                 f"run.output_dir={tmp_path}/typo"]}})[0]["typo"]
    assert "adapter.targets: 'v_projj' matches no module" in message
    assert "v_proj" in message.split("linear modules are")[1]
