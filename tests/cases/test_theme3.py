"""cases.md, theme 3, tokens and truncation: from files to batches. (B22 to B28 are in test_theme3_templates.py.)

B17 and B19 on single conversations are in unit/data/mask/test_chat.py, B15 on real tokenizers in test_pairs.py there.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from cases.sft import CHATML, TOKENS, Checked, found, learnt, row
from dist import reference
from dist.given import LLAMA, TOKENIZER, VOCABULARY, said, save_model, write_chats, write_recipe
from dist.harness import spawn
from dist.reference import Settings
from dist.rows import examples_of
from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.mask.encode import TextEncoder
from shardwise.data.steps.batch import IGNORE, make_batch
from shardwise.data.store.load import load_data
from shardwise.errors import DataError

# --- B15 doubled BOS ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def with_bos() -> Any:
    """A tokenizer that puts BOS before every text, and a template that prints it too."""
    tokenizer = copy.deepcopy(TOKENS)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)])
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    assert tokenizer(tokenizer.apply_chat_template(row("q", "a")["messages"], tokenize=False))["input_ids"][:2] == [
        tokenizer.bos_token_id] * 2  # render, then tokenise: the fault of the case
    return tokenizer


def test_b15_one_bos_without_loss(checked: Checked, with_bos: Any) -> None:
    report, examples = checked([row("q", "a")], tokenizer=with_bos)
    ids, weights = examples.get([0])[0]
    assert report["ok"] and [i for i, token in enumerate(ids) if token == with_bos.bos_token_id] == [0]
    assert weights[0] == 0 and learnt(examples, 0) == "a<|im_end|>"
    # What a sample at evaluation is asked with: the same ids up to the answer, so one BOS there too.
    asked = with_bos.apply_chat_template(row("q")["messages"], add_generation_prompt=True, return_dict=False)
    assert ids[:len(asked)].tolist() == asked and asked.count(with_bos.bos_token_id) == 1


def test_b15_a_template_that_prints_it_twice_is_refused(checked: Checked, with_bos: Any) -> None:
    report, _ = checked([row("q", "a")], tokenizer=with_bos, template="{{ bos_token }}{{ bos_token }}" + CHATML)
    assert found(report) == [("template_refused", [1])]


def test_b15_documents_have_the_tokenizers_bos_once_or_none(with_bos: Any) -> None:
    assert [ids.count(with_bos.bos_token_id) for ids in TextEncoder(with_bos).ids(["one", "two"])] == [1, 1]
    assert TextEncoder(with_bos).ids(["one"])[0] == [with_bos.bos_token_id, *TextEncoder(TOKENS).ids(["one"])[0]]


# --- B16 pad id = eos id ------------------------------------------------------------------------------------------

P, R, EOS = 11, 12, 2


def test_b16_targets_are_told_by_position_not_by_id() -> None:
    """Rows of 4 and 7 tokens; the second holds two answers. Each target is the token after, so labels shift by one."""
    rows = [([P, P, R, EOS], [0, 0, 1, 1]), ([P, R, EOS, P, P, R, EOS], [0, 1, 1, 0, 0, 1, 1])]
    batch = make_batch([[0], [1]], examples_of(rows), pad_id=EOS, max_tokens=14)
    assert batch.input_ids.tolist() == [[P, P, R, EOS, EOS, EOS, EOS], rows[1][0]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0, 0], [1] * 7]
    wide = [[IGNORE] * 7 for _ in range(2)]
    for k, position in enumerate(batch.keep.tolist()):
        for r in range(2):
            if batch.targets[r, k] != IGNORE:
                wide[r][position] = int(batch.targets[r, k])
    no = IGNORE
    assert wide == [[no, R, EOS, no, no, no, no], [R, EOS, no, no, R, EOS, no]]
    assert int((batch.targets == EOS).sum()) == 3  # as many as there are answers


def test_b16_from_a_file_with_pad_equal_to_eos(checked: Checked) -> None:
    tokenizer = copy.deepcopy(TOKENS)
    tokenizer.pad_token = tokenizer.eos_token
    _, examples = checked([row("hi", "yes"), row("hi", "yes", "and", "a longer answer")], tokenizer=tokenizer)
    batch = make_batch([[0], [1]], examples, pad_id=tokenizer.pad_token_id, max_tokens=512)
    assert [int((row == tokenizer.eos_token_id).sum()) for row in batch.targets] == [1, 2]


# --- B17, B19 through files -----------------------------------------------------------------------------------------

GEMMA = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def test_b17_a_terminator_that_is_not_eos(checked: Checked) -> None:
    assert TOKENS.eos_token == "<|im_end|>"
    _, examples = checked([row("hi", "yes", "so", "no")], template=GEMMA)
    ids, weights = examples.get([0])[0]
    assert weights[ids == TOKENS.convert_tokens_to_ids("<|endoftext|>")].tolist() == [0, 1, 0, 1]
    assert TOKENS.eos_token_id not in ids.tolist() and learnt(examples, 0) == "yes<|endoftext|>no<|endoftext|>"


def test_b19_one_odd_row_stops_no_other(checked: Checked) -> None:
    """The last answer ends with another token; the row with two answers in a row is trained as well."""
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    odd = row("q", "a")
    odd["messages"] += [{"role": "assistant", "content": "more"}]
    report, examples = checked([row("q1", "a1", "q2", "a2"), odd, {"messages": 3}], template=template)
    assert found(report) == [("wrong_schema", [3])]
    assert [learnt(examples, n) for n in (0, 1)] == ["a1<|im_end|>a2<|endoftext|>", "a<|im_end|>more<|endoftext|>"]


# --- B20 truncation leaves no supervised token ------------------------------------------------------------------------

LONG = "a long question " * 30
SHORT = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": said(n + 1)}] for n in range(4)]
GONE = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "lost"}]
B20 = ["data.max_length=64", "data.on_too_long=truncate", "batch.examples_per_step=4", "optim.name=sgd", "optim.lr=1",
       "optim.max_grad_norm=null", "schedule.kind=constant", "schedule.epochs=1"]
FILES = {"one_of_four": [SHORT[0], GONE, SHORT[2], SHORT[3]], "all_of_a_rank": [SHORT[0], GONE]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("b20")
    model = save_model(folder / "model", "llama", vocab_size=VOCABULARY, **LLAMA)
    runs = {name: [*B20, f"data.train=[{write_chats(folder / f'{name}.jsonl', chats)}]"]
            for name, chats in FILES.items()}
    recipe = write_recipe(folder / "recipe.yaml", model, folder / "one_of_four.jsonl")
    got: dict[str, Any] = spawn("dist.bodies:train_all", world_size=2, folder=folder / "out", timeout_s=60,
                                args={"recipe": str(recipe), "runs": runs})[0]
    return folder, got


@pytest.mark.parametrize("name", FILES)
def test_b20_the_loss_is_that_of_the_others(name: str, trained: tuple[Path, dict[str, Any]]) -> None:
    """(a) one row of four, (b) all that one of two ranks would have had."""
    folder, got = trained
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    rows = [reference.chat_row(tokenizer, chat) for chat in FILES[name] if chat is not GONE]
    want = reference.train(folder / "model", rows, Settings(
        examples_per_step=4, epochs=1, optimizer="sgd", lr=1.0, weight_decay=0.0, max_grad_norm=None, kind="constant"))
    assert got[name]["examples"] == [len(rows)] and got[name]["supervised_tokens"] == want.supervised_tokens
    assert got[name]["loss"] == pytest.approx(want.loss, rel=1e-6)
    for key, tensor in load_file(folder / "out" / f"{name}.safetensors").items():
        assert tensor == pytest.approx(want.weights[key], abs=1e-6), key


def test_b20_such_rows_are_counted_and_none_at_all_is_refused(checked: Checked, tmp_path: Path) -> None:
    """(c) Nothing to learn from in a whole run: it does not start, and no loss of 0.0 is shown."""
    options: dict[str, Any] = {"max_length": 64, "on_too_long": "truncate"}
    report, examples = checked([{"messages": chat} for chat in FILES["one_of_four"]], **options)
    assert report["ok"] and found(report) == [("too_long", [2])] and report["train"]["dropped"] == {"too_long": 1}
    assert len(examples) == 3
    report, _ = checked([{"messages": GONE}], **options)
    assert not report["ok"]
    assert report["refused"] == "data.train: no usable example is left of 1 rows (left out: too_long: 1)"
    with pytest.raises(DataError, match="no usable example is left of 1 rows"):
        load_data(DataConfig(train=(SourceConfig(path=str(tmp_path / "rows.jsonl")),), **options), TOKENS)
