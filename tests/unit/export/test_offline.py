"""Exports from damaged checkpoints, by mistaken users, and against the writer of final/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exported import IDS, Made, logits_of, make_run
from saved import save_checkpoint, write_meta
from shardwise import cli
from shardwise.errors import CheckpointError
from shardwise.export.offline import Wish, export
from shardwise.export.runs import open_run
from shardwise.export.weights import read, refuse_unlike
from shardwise.export.write import published, wanted_weights, write_model

ROOT = Path(__file__).parents[3]
LORA = ("adapter.kind=lora", "adapter.rank=4")


def rewritten(made: Made, **changes: object) -> None:
    """meta.json with checksums of the files as they are now."""
    meta = json.loads((made.checkpoint / "meta.json").read_text())
    write_meta(made.checkpoint, **{key: value for key, value in meta.items() if key != "files"} | changes)


def shards(made: Made) -> list[Path]:
    return sorted((made.checkpoint / "state").glob("*.safetensors"))


def test_offline_and_live_write_the_same_bytes(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    folder, _ = export(open_run(str(made.folder)), Wish())
    with published(tmp_path / "final") as part:
        write_model(part, made.live, dict(made.live.state_dict()), frame=made.folder / "skeleton",
                    wanted=wanted_weights(made.live), card="", record={})
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json",
                 "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (tmp_path / "final" / name).read_bytes(), name


@pytest.mark.parametrize("modules", ["[]", "[embed_tokens]"])
def test_the_adapter_folder_loads_in_plain_peft(tmp_path: Path, modules: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = make_run(tmp_path, *LORA, f"adapter.modules_to_save={modules}", ranks=3)
    folder, said = export(open_run(str(made.folder)), Wish())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, about ties
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made.base, dtype="auto"), str(folder))
    torch.testing.assert_close(logits_of(model), made.logits(), rtol=0, atol=1e-5)
    assert said == [] and json.loads((folder / "shardwise_check.json").read_text())["input_ids"] == IDS
    assert len(load_file(folder / "adapter_model.safetensors")) == len(made.trained)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(made.base)


def test_buffers_that_belong_to_the_weights_come_along(tmp_path: Path) -> None:
    # The router's bias of this family is a saved buffer, not a parameter.
    made = make_run(tmp_path, model_type="glm4_moe", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=16, n_routed_experts=4,
                    num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in load_file(made.folder / "skeleton/buffers.safetensors")
    folder, _ = export(open_run(str(made.folder)), Wish())
    written = load_file(folder / "model.safetensors")
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in written
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in written  # in the hub's layout, not the fused one


def test_the_card_says_what_it_is(tmp_path: Path) -> None:
    from ruamel.yaml import YAML

    made = make_run(tmp_path, *LORA)
    page = (export(open_run(str(made.folder)), Wish())[0] / "README.md").read_text()
    front = YAML(typ="safe").load(page.split("---")[1])
    assert front == {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["shardwise", "sft", "lora"]}
    for part in ("up to step 4", "PeftModel.from_pretrained", "| train: `chats.jsonl` | 21 | `abc` |",
                 "training loss: 6.0000 at step 1, 3.0000 at step 4", '"rank": 4'):
        assert part in page


def test_a_slice_that_is_missing_is_not_read_as_whatever_lay_in_memory(tmp_path: Path) -> None:
    made = make_run(tmp_path, ranks=3)
    shards(made)[1].unlink()
    rewritten(made)  # as if it had never been written
    with pytest.raises(CheckpointError, match=r"elements [\d,]+ to [\d,]+ are missing"):
        export(open_run(str(made.folder)), Wish())
    assert not (made.folder / "exports").exists() or not any((made.folder / "exports").iterdir())


def test_the_last_slice_missing(tmp_path: Path) -> None:
    made = make_run(tmp_path, ranks=3)
    shards(made)[2].unlink()
    rewritten(made)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight is \[\d+\], not \[32768\]"):
        export(open_run(str(made.folder)), Wish())


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_files_that_are_not_what_was_saved_are_named(tmp_path: Path, damage: str) -> None:
    made = make_run(tmp_path)
    path = shards(made)[1]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-100])
    if damage == "remove":
        path.unlink()
    what = "is missing" if damage == "remove" else "has changed since it was written"
    with pytest.raises(CheckpointError, match=f"{path.name} {what}"):
        export(open_run(str(made.folder)), Wish())


def test_a_weight_too_few_and_one_too_many(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    weights = dict(made.trained)
    norm = weights.pop("model.norm.weight")
    save_checkpoint(made.folder / "checkpoints", 5, weights)
    with pytest.raises(CheckpointError, match=r"the weight model.norm.weight \[32\] is missing"):
        export(open_run(str(made.folder)), Wish())
    save_checkpoint(made.folder / "checkpoints", 6, {**weights, "model.norm.weight": norm, "odd": norm})
    with pytest.raises(CheckpointError, match="the model has no weight odd"):
        export(open_run(str(made.folder)), Wish())


def test_a_weight_without_elements_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the weight a \[0\] has no elements"):
        refuse_unlike({"a": (0,)}, {"a": (0,)}, "here")
    with pytest.raises(CheckpointError, match=r"the weight a is \[0\], not \[4\]"):  # what zero3 leaves in a module
        refuse_unlike({"a": (0,)}, {"a": (4,)}, "here")


def test_values_beyond_fp16_are_refused_and_fit_bf16(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, {"a": torch.tensor([1.0, 70000.0])})
    with pytest.raises(CheckpointError, match="a holds values that are not finite in fp16.*--dtype bf16"):
        read(folder, {"a": (2,)}, dtype=torch.float16)
    assert read(folder, {"a": (2,)}, dtype=torch.bfloat16)["a"].tolist() == [1.0, 70144.0]


@pytest.mark.parametrize(("words", "said"), [
    (["--merge-lora"], "--merge-lora, but this run trained all weights"),
    (["--checkpoint", "9"], "--checkpoint 9: no complete checkpoint at"),
    (["--checkpoint", "9"], "complete ones in this run: 4"),
    (["--output", "taken"], "is not a folder that shardwise exported"),
    (["--output", "before"], "or --overwrite to replace it")])
def test_a_users_mistakes_are_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str],
                                            said: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "shardwise_export.json").write_text('{"merged": false}')
    assert cli.main(["export", str(made.folder), *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("**/*.part"))


def test_folders_that_are_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(tmp_path)]) == 2
    assert "is no run folder: there is no manifest.json" in capsys.readouterr().err
    made = make_run(tmp_path)
    (made.checkpoint / "meta.json").unlink()
    assert cli.main(["export", str(made.folder)]) == 2
    assert "no complete checkpoint there" in capsys.readouterr().err


def test_overwrite_replaces_an_earlier_export_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_run(tmp_path)
    words = ["export", str(made.folder), "--output", str(tmp_path / "out")]
    assert cli.main(words) == 0
    (tmp_path / "out" / "left over").write_text("")
    assert cli.main(words) == 2 and cli.main([*words, "--overwrite", "--dtype", "bf16"]) == 0
    assert not (tmp_path / "out" / "left over").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_it_works_where_the_model_is_gone_and_starts_no_process_group(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    made.base.rename(tmp_path / "gone")
    code = ("import sys; from shardwise.cli import main; code = main(sys.argv[1:]); import torch; "
            "assert not torch.distributed.is_initialized(); sys.exit(code)")
    done = subprocess.run([sys.executable, "-c", code, "export", str(made.folder)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"the model is in {made.folder}/exports/step-00000004-model-fp32" in done.stdout


def test_half_written_results_are_cleared_away(tmp_path: Path) -> None:
    old = tmp_path / "out"
    old.mkdir()
    with pytest.raises(RuntimeError), published(old) as part:
        save_file({"a": torch.zeros(1)}, part / "model.safetensors")
        raise RuntimeError("no space left")
    assert list(tmp_path.iterdir()) == [old]
