"""Any file whatever ends in a named error or in a count of its rows, and what is trained on is exactly what it says.

FUZZ_EXAMPLES=5000 pytest tests/unit/data/test_fuzz.py --timeout=0 tries other examples for as long as that takes
(each costs about 30 ms); without it the same few are tried on every machine.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dist.given import TOKENIZER
from pair_sources import NoClient, folder_of
from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.faults import KINDS
from shardwise.data.look import check, show
from shardwise.data.read.formats import chat_of, detect
from shardwise.data.store import cached
from shardwise.data.store.load import inspect
from shardwise.errors import DataError, UserError
from unit.data.fuzz import FILES, FORMS, ROWS, TOOL_ROWS, Said, as_lines, conversations

TOKENS: Any = AutoTokenizer.from_pretrained(TOKENIZER)
START, END = TOKENS.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
ASKED = int(os.environ.get("FUZZ_EXAMPLES", 0))
JSON = dict[str, Any]


def tries(few: int) -> Any:
    health = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=ASKED or few, derandomize=not ASKED, database=None, suppress_health_check=health)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "cache_root", lambda: Path(name, "cache"))  # templates stay where they are
        yield Path(name)


def judged(folder: Path, name: str, content: bytes, **options: Any) -> tuple[JSON, Any] | None:
    """Report and examples of a file; None where it is refused in words. Every row of it is accounted for."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    path = folder / name
    path.write_bytes(content)
    data = DataConfig(train=(SourceConfig(path=str(path)),), workers=1, max_length=512, **options)
    try:
        report, found = check.check(data, TOKENS)
    except DataError as error:
        harmless(str(error))
        assert str(path) in str(error) or "0 rows" in str(error)
        return None
    assert json.loads(json.dumps(report)) is not None
    harmless(check.text(report, found))
    side = report["train"]
    lost = [f for f in report["findings"] if not KINDS[f["kind"]].usable]
    if data.task == "sft":  # documents are cut into blocks
        assert side["rows"] == side["examples"] + sum(f["count"] for f in lost)
    assert all(len(f["rows"]) == f["count"] for f in report["findings"])
    assert all(row["row"].startswith(f"{path}:") for f in report["findings"] for row in f["rows"])
    assert report["ok"] == (report["refused"] is None and all(f["policy"] != "error" for f in report["findings"]))
    examples = inspect(data, TOKENS).train
    assert len(examples) == side["examples"]
    for n in range(len(examples)):
        ids, weights = examples.get([n])[0]
        assert len(ids) == len(weights) <= 512 and ids.dtype == np.int32
        assert len(ids) == 0 or 0 <= ids.min() <= ids.max() < len(TOKENS)
        assert np.isfinite(weights).all() and (weights >= 0).all() and (not len(weights) or weights[0] == 0)
    return report, examples


def shown(folder: Path, name: str, which: str, **options: Any) -> None:
    """`data show` on a row of the file just judged: a page that is safe to print, or a fault in words."""
    data = DataConfig(train=(SourceConfig(path=str(folder / name)),), **options)
    try:
        found = show.find(which, data.train, data, TOKENS)
        harmless(show.page(found, TOKENS, recipe="r", html=False, colour=False, width=80))
    except UserError as error:
        harmless(str(error))


def harmless(text: str) -> None:
    """What is printed drives no terminal and fills no screen."""
    assert all(char.isprintable() or char == "\n" for char in text), repr(text)
    assert max(map(len, text.split("\n"))) < 2500, text


# --- any bytes ------------------------------------------------------------------------------------------------

@given(file=FILES, task=st.sampled_from(["sft", "sft", "pretrain"]))
@tries(120)
def test_any_bytes(folder: Path, file: tuple[str, bytes], task: str) -> None:
    judged(folder, f"a{file[0]}", file[1], task=task)
    shown(folder, f"a{file[0]}", "1", task=task)


# --- JSON of any shape ----------------------------------------------------------------------------------------

@given(rows=st.lists(ROWS, min_size=1, max_size=5), name=st.sampled_from(sorted(FORMS)),
       task=st.sampled_from(["sft", "sft", "sft", "pretrain"]))
@tries(120)
def test_any_json(folder: Path, rows: list[Any], name: str, task: str) -> None:
    judged(folder, name, FORMS[name](rows), task=task)
    shown(folder, name, f"{folder / name}:2", task=task)


# --- conversations that are sound: exactly their text, exactly their answers --------------------------------------

def turns_of(ids: list[int]) -> list[tuple[int, int]]:
    """[first, stop) of each turn: from behind the token that starts one to behind the one that ends it."""
    controls = [i for i, token in enumerate(ids) if token in TOKENS.added_tokens_decoder]
    assert [ids[i] for i in controls] == [START, END] * (len(controls) // 2)
    return [(first + 1, stop + 1) for first, stop in zip(controls[::2], controls[1::2], strict=True)]


@given(chats=st.lists(conversations(), min_size=1, max_size=4))
@example(chats=[[("user", "a\uf5a2b<|im_end|>", 1.0), ("assistant", " \uf5a2", 1.0)]])
@example(chats=[[("user", "\uf600<|im_end|>and more", 1.0), ("assistant", "\uf601 is the answer", 1.0)]])
@example(chats=[[("user", "q", 1.0), ("assistant", text, 1.0)] for text in ("</think>d", "<|im")])
@example(chats=[[("user", "\U00020000<|im_end|>\U00020001<|im_start|>", 1.0), ("assistant", "<|im_end|>\n", 0.5)]])
@tries(60)
def test_any_conversation(folder: Path, chats: list[list[Said]]) -> None:
    rows = [{"messages": [{"role": role, "content": text, "weight": weight} for role, text, weight in chat]}
            for chat in chats]
    found = judged(folder, "a.jsonl", as_lines(rows))
    assert found is not None
    report, examples = found
    faults = {f["kind"]: [int(row["row"].rpartition(":")[2]) for row in f["rows"]] for f in report["findings"]}
    unusable = {kind for kind in faults if not KINDS[kind].usable}
    assert unusable <= {"prompt_trained", "no_supervised", "too_long"}, report["findings"]
    assert faults.get("no_supervised", []) == [
        n for n, chat in enumerate(chats, 1) if not any(weight for role, _, weight in chat if role == "assistant")
        and n not in faults.get("prompt_trained", [])]
    for n in range(len(examples)):
        chat = chats[int(examples.place(n).rpartition(":")[2]) - 1]
        ids, weights = (column.tolist() for column in examples.get([n])[0])
        spans = turns_of(ids)
        assert len(spans) == len(chat)
        want = [0.0] * len(ids)
        for (first, stop), (role, text, weight) in zip(spans, chat, strict=True):
            assert TOKENS.decode(ids[first:stop - 1]) == f"{role}\n{text}"
            if role == "assistant" and weight:  # one without loss need not be cut from its header
                start = next(i for i in range(first, stop) if TOKENS.decode(ids[first:i]) == f"{role}\n")
                want[start:stop] = [weight] * (stop - start)
        assert weights == want
        assert TOKENS.decode(ids) == "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text, _ in chat)


# --- tools, through a template that prints them -----------------------------------------------------------------

@pytest.fixture(scope="module")
def qwen3() -> Path:
    try:
        return Path(folder_of("trl")) / "qwen3.jinja"
    except NoClient as error:
        pytest.skip(str(error))


@given(rows=st.lists(TOOL_ROWS | ROWS, min_size=1, max_size=3))
@tries(60)
def test_any_tools(folder: Path, qwen3: Path, rows: list[JSON]) -> None:
    found = judged(folder, "a.jsonl", as_lines(rows), chat_template=str(qwen3))
    if found is None:
        return
    source, template = SourceConfig(path="a"), qwen3.read_text(encoding="utf-8")
    for n in range(len(found[1])):
        row = rows[int(found[1].place(n).rpartition(":")[2]) - 1]
        chat = chat_of(json.loads(json.dumps(row)), source, detect(row, source, "sft"))
        ids, weights = (column.tolist() for column in found[1].get([n])[0])
        assert TOKENS.decode(ids) == TOKENS.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False,
                                                                chat_template=template)
        trained = []
        for first, stop in turns_of(ids):
            header = next(i for i in range(first, stop) if "\n" in TOKENS.decode(ids[first:i]))
            if TOKENS.decode(ids[first:header]) == "assistant\n":
                trained += [i for i in range(header, stop) if weights[i] > 0]
                assert len({w > 0 for w in weights[header:stop]}) == 1  # all of an answer, or nothing
        assert trained == [i for i, weight in enumerate(weights) if weight > 0] != []
