"""cases.md: B38 (tied embeddings), B40 (offline fp32 weights), B82 (merging), from checkpoints of several ranks.
B39 and B52 need ranks: dist/test_adapter_and_export.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from exported import Made, logits_of, make_run
from shardwise.errors import CheckpointError, UserError
from shardwise.export.offline import Wish, export
from shardwise.export.runs import open_run

LORA = ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=12")


def exported(made: Made, **wish: object) -> Path:
    return export(open_run(str(made.folder)), Wish(**wish))[0]  # type: ignore[arg-type]


def reloaded(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_b38_tied_and_untied_models_come_back_as_they_were(tmp_path: Path, tied: bool, ranks: int) -> None:
    made = make_run(tmp_path, tied=tied, ranks=ranks)
    folder = exported(made)
    model = reloaded(folder)
    torch.testing.assert_close(logits_of(model), made.logits(), rtol=0, atol=1e-5)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    on_disk = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in on_disk) == (not tied)  # one copy of a tied pair
    check = json.loads((folder / "shardwise_check.json").read_text())
    torch.testing.assert_close(torch.tensor(check["logits"]), made.logits(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_b40_every_weight_is_the_master_weight_rounded_once(tmp_path: Path, dtype: str) -> None:
    made = make_run(tmp_path, ranks=3)
    on_disk = load_file(exported(made, dtype=dtype) / "model.safetensors")
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert set(on_disk) == set(made.trained) and len(on_disk) == 20
    for name, tensor in made.trained.items():
        assert on_disk[name].dtype == kind and torch.equal(on_disk[name], tensor.to(kind)), name


def test_b40_frozen_weights_are_those_of_the_base_bit_for_bit(tmp_path: Path) -> None:
    made = make_run(tmp_path, *LORA, "adapter.targets=[q_proj, v_proj]")
    merged, base = load_file(exported(made, merge_lora=True) / "model.safetensors"), \
        load_file(made.base / "model.safetensors")
    assert set(merged) == set(base)
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {f"model.layers.{n}.self_attn.{which}_proj.weight" for n in (0, 1) for which in "qv"}


@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_b82_merged_is_w_plus_scale_b_a_in_fp32_rounded_once(tmp_path: Path, base_dtype: torch.dtype,
                                                             dtype: torch.dtype) -> None:
    made = make_run(tmp_path, *LORA, base_dtype=base_dtype)
    name = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}[dtype]
    merged = load_file(exported(made, merge_lora=True, dtype=name) / "model.safetensors")
    base, bluntly = load_file(made.base / "model.safetensors"), 0
    for key, weight in base.items():
        low_rank = {side: value for full, value in made.trained.items()
                    for side in "AB" if f"{key.removesuffix('.weight')}.lora_{side}." in full}
        want = weight.float()
        if low_rank:
            want = want + 12 / 4 * (low_rank["B"] @ low_rank["A"])
            in_steps = weight.bfloat16() + (3 * (low_rank["B"] @ low_rank["A"])).bfloat16()
            bluntly += int((in_steps != want.to(torch.bfloat16)).sum())
        assert torch.equal(merged[key], want.to(dtype)), key
    assert bluntly > 100  # rounding the update first, as merging in bf16 does, would not pass


def test_b82_the_merged_model_is_the_live_one(tmp_path: Path) -> None:
    made = make_run(tmp_path, *LORA)
    torch.testing.assert_close(logits_of(reloaded(exported(made, merge_lora=True))), made.logits(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("modules", ["embed_tokens", "lm_head", "[embed_tokens, lm_head]"])
def test_b82_trained_modules_of_a_tied_model_are_merged_as_they_are(tmp_path: Path, modules: str) -> None:
    made = make_run(tmp_path, *LORA, f"adapter.modules_to_save={modules}")
    folder = exported(made, merge_lora=True)
    model = reloaded(folder)
    torch.testing.assert_close(logits_of(model), made.logits(), rtol=0, atol=1e-5)
    told = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert told == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)
    assert told is False


def test_b82_an_adapter_on_a_tied_head_leaves_the_embedding_alone(tmp_path: Path) -> None:
    made = make_run(tmp_path, *LORA, "adapter.targets=[q_proj, lm_head]")
    model = reloaded(exported(made, merge_lora=True))
    torch.testing.assert_close(logits_of(model), made.logits(), rtol=0, atol=1e-5)
    assert torch.equal(model.get_input_embeddings().weight,
                       load_file(made.base / "model.safetensors")["model.embed_tokens.weight"])


def test_b82_another_base_is_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path, *LORA)
    weights = load_file(made.base / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3  # one value, same shapes and size
    save_file(weights, made.base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has other weights .* right on the weights it was trained on only"):
        exported(made, merge_lora=True)
    folder, said = export(open_run(str(made.folder)), Wish())  # the adapter itself is fine
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "shardwise_check.json").exists()
    assert "not tried on its base" in said[0]


def test_b82_merging_twice_is_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path, *LORA)
    merged = exported(made, merge_lora=True)
    with pytest.raises(UserError, match="the result of an export, with its adapter merged already"):
        open_run(str(merged))
    made.base.rename(tmp_path / "first")
    merged.rename(made.base)  # the merged model in the base's place
    with pytest.raises(CheckpointError, match="merging twice would add it twice"):
        exported(made, merge_lora=True)


def test_b82_a_quantised_base_is_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path, *LORA)
    config = json.loads((made.base / "config.json").read_text())
    (made.base / "config.json").write_text(json.dumps(config | {"quantization_config": {
        "quant_method": "bitsandbytes", "load_in_4bit": True}}))
    with pytest.raises(CheckpointError, match=r"quantised \(bitsandbytes\).*rounded to a few bits"):
        exported(made, merge_lora=True)
