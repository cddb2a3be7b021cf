"""cases.md, theme 9 (B56-B58) and the reading half of theme 3 (B24, B26, B28): files as rows, rows as chats."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.config.schema import SourceConfig
from shardwise.data.faults import RowFault
from shardwise.data.read.files import files_of
from shardwise.data.read.formats import chat_of, detect, text_of
from shardwise.data.read.lint import refuse
from shardwise.data.read.readers import plan, read
from shardwise.data.rows import Chat
from shardwise.errors import DataError

PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
GOOD = {"messages": PAIR}


def rows_of(path: Path) -> list[tuple[int, Any]]:
    """(line, object, or the kind of fault) of every row."""
    return [(line, value.kind if isinstance(value, RowFault) else value)
            for file in files_of(SourceConfig(path=str(path))) for unit in plan(file) for line, value in read(unit)]


def chats_of(path: Path, **settings: Any) -> Iterator[tuple[int, Chat | str]]:
    """(line, conversation, or the kind of fault) of every row, checked."""
    source = SourceConfig(path=str(path), **settings)
    for line, value in rows_of(path):
        try:
            if isinstance(value, str):
                raise RowFault(value, "")
            chat = refuse(chat_of(value, source, detect(value, source, "sft")))
            yield line, chat.notes[0] if chat.notes else chat
        except RowFault as fault:
            yield line, fault.kind


def lines(path: Path, rows: list[Any], end: str = "\n") -> Path:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode())
    return path


# --- B24 None, empty, system-only, assistant-first ------------------------------------------------------------

@pytest.mark.parametrize(("value", "kind"), [
    ({"messages": [PAIR[0], {"role": "assistant", "content": None}]}, "null_content"),
    ({"messages": [PAIR[0], {"role": "assistant"}]}, "null_content"),
    ({"messages": [PAIR[0], {"role": "assistant", "content": ""}]}, "empty_turn"),
    ({"messages": [PAIR[0], {"role": "assistant", "content": " \n"}]}, "empty_turn"),
    ({"messages": []}, "no_messages"),
    ({"messages": None}, "no_messages"),
    ({"messages": [{"role": "system", "content": "s"}]}, "no_messages"),
    ({"messages": [PAIR[0]]}, "no_messages"),
    ({"messages": [PAIR[1], PAIR[0]]}, "role_order"),
    ({"prompt": "q", "completion": None}, "null_content"),
    ({"instruction": None, "output": "a"}, "null_content"),
    ({"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "a"}]}, "null_content"),
])
def test_b24_a_row_without_an_answer_is_named_and_its_neighbours_are_read(tmp_path: Path, value: Any,
                                                                           kind: str) -> None:
    path = lines(tmp_path / "a.jsonl", [GOOD, value, GOOD])
    good = Chat(PAIR, [1.0, 1.0])
    assert list(chats_of(path)) == [(1, good), (2, kind), (3, good)]


def test_b24_none_never_reaches_a_template(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    turns = [PAIR[0], {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
             {"role": "tool", "content": "", "tool_call_id": None}, PAIR[1]]
    path = lines(tmp_path / "a.jsonl", [{"messages": turns, "system": None, "tools": None, "weight": None}])
    [(_, chat)] = chats_of(path)
    assert isinstance(chat, Chat)
    assert [message["content"] for message in chat.messages] == ["q", "", "", "a"]
    assert "None" not in str(chat.messages) and chat.tools is None


# --- B26 tool schemas and arguments ---------------------------------------------------------------------------

def tool(name: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": f"of {name}"}}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def tool_row(name: str, parameter: str, *, as_text: bool = False) -> dict[str, Any]:
    arguments: Any = {parameter: "x"}
    call = {"type": "function", "function": {"name": name,
                                             "arguments": json.dumps(arguments) if as_text else arguments}}
    return {"messages": [PAIR[0], {"role": "assistant", "content": "", "tool_calls": [call]},
                         {"role": "tool", "content": "r"}, PAIR[1]], "tools": [tool(name, parameter)]}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_b26_no_row_shows_the_parameters_of_another(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    rows = [tool_row("f", "city"), tool_row("g", "query")]
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        raw = pq.read_table(path).to_pylist()[0]["tools"][0]["function"]["parameters"]["properties"]
        assert raw["query"] is None  # what Arrow makes of it
    else:
        path.write_text(json.dumps(rows) if suffix == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    (_, first), (_, second) = chats_of(path)
    assert isinstance(first, Chat) and isinstance(second, Chat)
    assert (first.tools, second.tools) == ([tool("f", "city")], [tool("g", "query")])
    seen = json.dumps([first.messages, first.tools])
    assert "query" not in seen and "null" not in seen
    assert first.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "x"}}


def test_b26_arguments_as_text_and_as_an_object_are_the_same_conversation(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [tool_row("f", "city"), tool_row("f", "city", as_text=True)])
    (_, first), (_, second) = chats_of(path)
    assert isinstance(first, Chat) and isinstance(second, Chat)
    assert json.dumps(first.messages) == json.dumps(second.messages)


def test_b26_tools_as_text_and_as_a_list_are_the_same(tmp_path: Path) -> None:
    row = tool_row("f", "city")
    bare = [row["tools"][0]["function"]]
    path = lines(tmp_path / "a.jsonl", [row, {**row, "tools": json.dumps(row["tools"])}, {**row, "tools": bare}])
    (_, first), *others = chats_of(path)
    assert [chat for _, chat in others] == [first, first]


# --- B28 emoji, CRLF, U+2028, NEL -----------------------------------------------------------------------------

STRANGE = ["one\u2028two\u2029", "one\u0085two", "\U0001f600 one", "one\r\ntwo\rthree"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_b28_strange_characters_are_four_rows_as_written(tmp_path: Path, end: str, escaped: bool,
                                                         packed: bool) -> None:
    rows = [{"prompt": "q", "completion": text} for text in STRANGE]
    content = "".join(json.dumps(row, ensure_ascii=escaped) + end for row in rows).encode()
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    got = [(line, chat.messages[1]["content"]) for line, chat in chats_of(path) if isinstance(chat, Chat)]
    assert got == list(enumerate(STRANGE, start=1))


def test_b28_strange_characters_in_other_files(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": text} for text in STRANGE]
    (tmp_path / "a.json").write_bytes(json.dumps(rows, ensure_ascii=False, indent=1).encode())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_bytes(("prompt,completion\n" + "".join(f'q,"{text}"\n' for text in STRANGE)).encode())
    for name in ("a.json", "b.parquet", "c.csv"):
        assert [value for _, value in rows_of(tmp_path / name)] == rows


# --- B56 schema fixed by the first chunk ----------------------------------------------------------------------

def test_b56_a_column_that_is_null_for_sixty_thousand_rows_and_then_text(tmp_path: Path) -> None:
    short = {**GOOD, "note": None, "pad": "x" * 120}
    path = lines(tmp_path / "a.jsonl", [short] * 60_000 + [{**GOOD, "note": "late", "pad": ""}])
    assert path.stat().st_size > 10_000_000
    rows = rows_of(path)
    assert len(rows) == 60_001
    assert rows[0] == (1, short) and rows[-1] == (60_001, {**GOOD, "note": "late", "pad": ""})


@pytest.mark.parametrize("first", [None, []])
def test_b56_a_file_whose_column_is_empty_beside_one_where_it_is_not(tmp_path: Path, first: Any) -> None:
    lines(tmp_path / "a.jsonl", [{**GOOD, "system": None, "tags": first}] * 3)
    lines(tmp_path / "b.jsonl", [{**GOOD, "system": "s", "tags": ["t"]}])
    chats = [chat for _, chat in chats_of(tmp_path)]
    with_system = Chat([{"role": "system", "content": "s"}, *PAIR], [1.0] * 3)
    assert chats == [Chat(PAIR, [1.0, 1.0])] * 3 + [with_system]


def test_b56_nothing_guesses_types(tmp_path: Path) -> None:
    rows = [{"prompt": "2024-01-01", "completion": "1e5"}, {"prompt": "true", "completion": "007"}]
    path = lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.csv").write_text("prompt,completion\n2024-01-01,1e5\ntrue,007\n")
    assert [value for _, value in rows_of(path)] == rows
    assert [value for _, value in rows_of(tmp_path / "b.csv")] == rows


def test_b56_a_column_of_two_types_is_a_matter_of_its_row_alone(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{**GOOD, "x": 1}, {"messages": [PAIR[0], {"role": "assistant", "content": 3}]},
                                        {**GOOD, "x": {"y": []}}])
    assert [what if isinstance(what, str) else "chat" for _, what in chats_of(path)] == ["chat", "wrong_schema", "chat"]


# --- B57 damaged jsonl ----------------------------------------------------------------------------------------

LINE = json.dumps(GOOD).encode()


def of_bytes(tmp_path: Path, content: bytes) -> list[tuple[int, Any]]:
    (tmp_path / "a.jsonl").write_bytes(content)
    return rows_of(tmp_path / "a.jsonl")


def test_b57_cut_last_line(tmp_path: Path) -> None:
    assert of_bytes(tmp_path, LINE + b"\n" + LINE[:-10]) == [(1, GOOD), (2, "broken_json")]


def test_b57_bom(tmp_path: Path) -> None:
    assert of_bytes(tmp_path, b"\xef\xbb\xbf" + LINE + b"\n" + LINE + b"\n") == [(1, GOOD), (2, GOOD)]


def test_b57_blank_lines(tmp_path: Path) -> None:
    assert of_bytes(tmp_path, b"\n" + LINE + b"\n \t\r\n\n" + LINE + b"\n\n") == [(2, GOOD), (5, GOOD)]


def test_b57_bad_byte(tmp_path: Path) -> None:
    assert of_bytes(tmp_path, LINE + b"\n" + LINE.replace(b"q", b"\xff") + b"\n" + LINE) == [
        (1, GOOD), (2, "bad_utf8"), (3, GOOD)]


def test_b57_lone_surrogate_escape(tmp_path: Path) -> None:
    assert of_bytes(tmp_path, LINE + b"\n" + LINE.replace(b'"q"', b'"q\\ud83d"') + b"\n" + LINE) == [
        (1, GOOD), (2, "bad_utf8"), (3, GOOD)]


def test_b57_empty_file(tmp_path: Path) -> None:
    assert of_bytes(tmp_path, b"") == []
    assert of_bytes(tmp_path, b"\n\n") == []


def test_b57_a_json_array(tmp_path: Path) -> None:
    assert of_bytes(tmp_path, b"[" + LINE + b"]\n") == [(1, "broken_json")]
    (tmp_path / "b.json").write_bytes(b"[" + LINE + b",\n" + LINE + b"]\n")
    assert rows_of(tmp_path / "b.json") == [(1, GOOD), (2, GOOD)]


# --- B58 extra, missing, renamed columns ----------------------------------------------------------------------

def test_b58_from_and_value_mean_what_role_and_content_mean(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [
        GOOD, {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}])
    assert list(chats_of(path)) == [(1, Chat(PAIR, [1.0, 1.0])), (2, Chat(PAIR, [1.0, 1.0]))]


def test_b58_an_extra_key_is_ignored(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [GOOD, {**GOOD, "extra": {"deep": [1]}}])
    first, second = (chat for _, chat in chats_of(path))
    assert first == second == Chat(PAIR, [1.0, 1.0])


def test_b58_renamed_columns_are_mapped(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}])
    assert list(chats_of(path)) == [(1, "wrong_schema")]
    assert list(chats_of(path, columns={"prompt": "question", "completion": "answer"})) == [
        (1, Chat(PAIR, [1.0, 1.0]))]


def test_b58_the_error_lists_columns_found_and_wanted_and_the_way_out() -> None:
    with pytest.raises(RowFault) as caught:
        detect({"question": "q", "answer": "a"}, SourceConfig(path="x"), "sft")
    assert caught.value.kind == "wrong_schema"
    assert caught.value.text == (
        "no known format fits. Columns found: question, answer. Wanted: messages: messages; "
        "conversations: conversations; prompt_completion: prompt, completion; instruction: instruction, output. "
        "Perhaps columns: {prompt: question, completion: answer}")


def test_b58_wrong_text_column() -> None:
    with pytest.raises(RowFault) as caught:
        detect({"content": "x"}, SourceConfig(path="x"), "pretrain")
    assert caught.value.text == ("no known format fits. Columns found: content. Wanted: text: text. "
                                 "Perhaps columns: {text: content}")
    assert text_of({"content": "x"}, SourceConfig(path="x", columns={"text": "content"})) == "x"


def test_b58_two_sources_of_different_formats(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [GOOD])
    lines(tmp_path / "b.jsonl", [{"instruction": "q", "input": "", "output": "a", "id": 7}])
    assert [chat for _, chat in chats_of(tmp_path)] == [Chat(PAIR, [1.0, 1.0])] * 2


def test_b58_a_table_merged_from_two_data_sets(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [GOOD, {"prompt": "q", "completion": "a"}]
    no_column: dict[str, Any] = {"messages": None, "prompt": None, "completion": None}
    pq.write_table(pa.Table.from_pylist([no_column | row for row in rows]), tmp_path / "a.parquet")
    assert [chat for _, chat in chats_of(tmp_path / "a.parquet")] == [Chat(PAIR, [1.0, 1.0])] * 2


def test_b58_a_folder_without_rows_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file in this folder"):
        rows_of(tmp_path)
