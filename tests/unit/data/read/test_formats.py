"""Rows of every known format as the one shape the rest works with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.config.schema import SourceConfig
from shardwise.data.faults import RowFault
from shardwise.data.read.formats import chat_of, detect, text_of
from shardwise.data.rows import Chat

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PAIR = [USER, ANSWER]


def source(**settings: Any) -> SourceConfig:
    return SourceConfig(path="x.jsonl", **settings)


def chat(value: dict[str, Any], **settings: Any) -> Chat:
    given = source(**settings)
    return chat_of(value, given, detect(value, given, "sft"))


def fault(value: dict[str, Any], **settings: Any) -> tuple[str, str]:
    with pytest.raises(RowFault) as caught:
        chat(value, **settings)
    return caught.value.kind, caught.value.text


def messages(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


@pytest.mark.parametrize(("value", "task", "want"), [
    ({"messages": []}, "sft", "messages"),
    ({"conversations": [], "id": 1}, "sft", "conversations"),
    ({"prompt": "", "completion": ""}, "sft", "prompt_completion"),
    ({"instruction": "", "output": ""}, "sft", "instruction"),
    ({"messages": [], "conversations": [], "text": ""}, "sft", "messages"),
    ({"messages": None, "prompt": "", "completion": ""}, "sft", "prompt_completion"),
    ({"messages": None}, "sft", "messages"),
    ({"prompt": "q", "completion": None}, "sft", "prompt_completion"),
    ({"text": "", "messages": []}, "pretrain", "text"),
])
def test_detect(value: dict[str, Any], task: str, want: str) -> None:
    assert detect(value, source(), task) == want


def test_detect_follows_format_and_columns() -> None:
    both = {"messages": [], "prompt": "", "completion": ""}
    assert detect(both, source(format="prompt_completion"), "sft") == "prompt_completion"
    assert detect({"q": "", "r": ""}, source(columns={"prompt": "q", "completion": "r"}), "sft") == "prompt_completion"
    assert detect({"body": ""}, source(columns={"text": "body"}), "pretrain") == "text"


@pytest.mark.parametrize(("value", "task", "text"), [
    ({"question": "", "answer": "", "id": 1}, "sft",
     "no known format fits. Columns found: question, answer, id. Wanted: messages: messages; "
     "conversations: conversations; prompt_completion: prompt, completion; instruction: instruction, output. "
     "Perhaps columns: {prompt: question, completion: answer}"),
    ({"dialogue": []}, "sft", "Perhaps columns: {messages: dialogue}"),
    ({"Messages": []}, "sft", "Perhaps columns: {messages: Messages}"),
    ({"prompt": "", "response": ""}, "sft", "Perhaps columns: {completion: response}"),
    ({"instructions": "", "response": ""}, "sft", "Perhaps columns: {instruction: instructions, output: response}"),
    ({"text": ""}, "sft", "These columns are what data.task=pretrain reads"),
    ({}, "sft", "Columns found: none. "),
    ({"x": 1}, "sft", "Name them with columns: {OUR NAME: NAME IN THE FILE}"),
    ({"body": "", "id": 1}, "pretrain",
     "no known format fits. Columns found: body, id. Wanted: text: text. Perhaps columns: {text: body}"),
    ({"messages": []}, "pretrain", "These columns are what data.task=sft reads"),
])
def test_what_a_row_of_no_format_is_told(value: dict[str, Any], task: str, text: str) -> None:
    with pytest.raises(RowFault) as caught:
        detect(value, source(), task)
    assert caught.value.kind == "wrong_schema"
    assert text in caught.value.text


def test_a_mapped_column_that_is_not_there() -> None:
    with pytest.raises(RowFault) as caught:
        detect({"prompt": "", "completion": ""}, source(format="prompt_completion", columns={"prompt": "q"}), "sft")
    assert "Wanted: prompt_completion: q (as prompt), completion" in caught.value.text


def test_a_format_of_the_other_task() -> None:
    with pytest.raises(RowFault, match="format: text is not for data.task=sft, which reads messages or conv"):
        detect({"text": ""}, source(format="text"), "sft")


# --- the chat formats ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("value", [
    {"messages": PAIR},
    {"messages": json.dumps(PAIR)},
    {"messages": [{**USER, "id": 7}, {**ANSWER, "extra": None}], "source": "x"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"prompt": "q", "completion": "a"},
    {"prompt": "q", "completion": "a", "system": "", "tools": None},
    {"prompt": [USER], "completion": [ANSWER]},
    {"prompt": [USER], "completion": "a"},
    {"instruction": "q", "output": "a"},
    {"instruction": "q", "input": " ", "output": "a", "system": None, "history": []},
    {"instruction": "", "input": "q", "output": "a"},
])
def test_one_exchange_in_every_format(value: dict[str, Any]) -> None:
    assert chat(value) == Chat(PAIR, [1.0, 1.0], None)


def test_content_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "\ntwo"}]
    assert chat(messages({"role": "user", "content": parts}, ANSWER)).messages[0]["content"] == "one \ntwo"


@pytest.mark.parametrize(("speaker", "role"), [
    ("human", "user"), ("user", "user"), ("gpt", "assistant"), ("chatgpt", "assistant"), ("assistant", "assistant"),
    ("bot", "assistant"), ("model", "assistant"), ("system", "system"), ("tool", "tool"), ("observation", "tool"),
    ("function_response", "tool"), ("ipython", "tool"), ("developer", "developer"), ("narrator", "narrator"),
])
def test_speakers(speaker: str, role: str) -> None:
    assert chat({"conversations": [{"from": speaker, "value": "x"}]}).messages == [{"role": role, "content": "x"}]


def test_own_roles_and_keys() -> None:
    want = Chat(PAIR, [1.0, 1.0])
    turns = [{"speaker": "customer", "utterance": "q"}, {"speaker": "agent", "utterance": "a"}]
    roles = {"customer": "user", "agent": "assistant"}
    keys = {"role": "speaker", "content": "utterance"}
    assert chat({"messages": turns}, columns=keys, roles=roles) == want
    assert chat({"conversations": turns}, columns=keys, roles=roles) == want
    assert chat({"conversations": turns}, columns={"from": "speaker", "value": "utterance"}, roles=roles) == want
    assert chat({"talk": turns}, columns={"messages": "talk", **keys}, roles=roles) == want
    assert chat({"conversations": [{"from": "human", "value": "q"}]}, roles={"human": "system"}).messages == [
        {"role": "system", "content": "q"}]


def test_a_function_call_turn() -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    got = chat({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(call)},
                                  {"from": "observation", "value": "3"}, {"from": "gpt", "value": "a"}]})
    assert got.messages == [USER, {"role": "assistant", "content": "",
                                   "tool_calls": [{"type": "function", "function": call}]},
                            {"role": "tool", "content": "3"}, ANSWER]
    several = chat({"conversations": [{"from": "function_call", "value": json.dumps([call, call])}]})
    assert len(several.messages[0]["tool_calls"]) == 2


@pytest.mark.parametrize("value", [
    {"prompt": "q", "completion": "a", "system": "s"},
    {"instruction": "q", "output": "a", "system": "s"},
    {"messages": PAIR, "system": "s"},
    {"messages": [{"role": "system", "content": "s"}, *PAIR], "system": "s"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
])
def test_a_system_column(value: dict[str, Any]) -> None:
    assert chat(value) == Chat([{"role": "system", "content": "s"}, *PAIR], [1.0, 1.0, 1.0])


def test_two_system_texts() -> None:
    assert fault(messages({"role": "system", "content": "t"}, *PAIR, system="s")) == (
        "wrong_schema", 'two system texts: column system ("s") and turn 0 ("t")')


def test_instruction_with_input_and_history() -> None:
    got = chat({"instruction": "translate", "input": "chat", "output": "cat",
                "history": [["q1", "a1"], ["q2", "a2"]]})
    assert [(m["role"], m["content"]) for m in got.messages] == [
        ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"), ("user", "translate\n\nchat"),
        ("assistant", "cat")]


def test_null_content_is_kept_as_none() -> None:
    assert chat(messages(USER, {"role": "assistant", "content": None})).messages[1] == {
        "role": "assistant", "content": None}
    assert chat(messages(USER, {"role": "assistant"})).messages[1]["content"] is None
    assert chat({"prompt": "q", "completion": None}).messages[1]["content"] is None


def test_what_a_template_may_use_is_kept() -> None:
    got = chat(messages(USER, {**ANSWER, "reasoning_content": "r", "name": "n", "logprobs": 1},
                        {"role": "tool", "content": "", "tool_call_id": "1", "name": None}))
    assert got.messages[1:] == [{**ANSWER, "reasoning_content": "r", "name": "n"},
                                {"role": "tool", "content": "", "tool_call_id": "1"}]


@pytest.mark.parametrize(("value", "kind", "text"), [
    ({"messages": None}, "no_messages", "messages is null"),
    ({"messages": "hello"}, "wrong_schema", 'messages is a string ("hello"); a list is wanted'),
    ({"messages": '[{"role": '}, "broken_json", "messages: not valid JSON: Expecting value at character 11, "
                                                'near "[{\\"role\\": "'),
    ({"messages": {"role": "user"}}, "wrong_schema", 'messages is an object ({"role": "user"}); a list is wanted'),
    (messages(USER, "a"), "wrong_schema", 'turn 1 is a string ("a"); an object is wanted'),
    (messages({"role": 3, "content": "q"}), "wrong_schema", "turn 0: role is 3; text is wanted. Found: role, content"),
    (messages({"content": "q"}), "wrong_schema", "turn 0: role is null; text is wanted. Found: content"),
    (messages(USER, {"role": "assistant", "content": 42}), "wrong_schema",
     "turn 1 (assistant): content is a number (42); text is wanted"),
    (messages({"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}), "wrong_schema",
     'turn 0 (user): part 0 of content is {"type": "image_url", "image_url": "u"}; only parts of '
     '{"type": "text", "text": ...} are trained on'),
    (messages({"from": "human", "value": "q"}), "wrong_schema",
     "turn 0: role is null; text is wanted. Found: from, value. To read them as conversations: "
     "columns: {conversations: messages}"),
    ({"conversations": PAIR}, "wrong_schema",
     "turn 0: from is null; text is wanted. Found: role, content. To read them as messages: "
     "columns: {messages: conversations}"),
    ({"prompt": 3, "completion": "a"}, "wrong_schema", "prompt is a number (3); text is wanted"),
    ({"prompt": "q", "completion": "a", "system": {}}, "wrong_schema", "system is an object ({}); text is wanted"),
    ({"instruction": "q", "input": ["x"], "output": "a"}, "wrong_schema",
     'input is an array (["x"]); text is wanted'),
    ({"instruction": "q", "output": "a", "history": [["x"]]}, "wrong_schema",
     'history[0] is ["x"]; [question, answer] is wanted'),
    (messages(USER, {**ANSWER, "name": 3}), "wrong_schema", "turn 1 (assistant): name is 3; text is wanted"),
], ids=range(16))
def test_wrong_types(value: dict[str, Any], kind: str, text: str) -> None:
    assert fault(value) == (kind, text)


# --- weights -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("keys", "weight"), [
    ({}, 1.0), ({"train": True}, 1.0), ({"train": False}, 0.0), ({"weight": 0}, 0.0), ({"weight": 1}, 1.0),
    ({"weight": 0.25}, 0.25), ({"weight": 2}, 2.0), ({"weight": None, "train": None}, 1.0),
])
def test_weights(keys: dict[str, Any], weight: float) -> None:
    got = chat(messages(USER, {**ANSWER, **keys}))
    assert got == Chat(PAIR, [1.0, weight])
    assert chat({"conversations": [{"from": "gpt", "value": "a", **keys}]}).weights == [weight]


@pytest.mark.parametrize(("keys", "text"), [
    ({"train": True, "weight": 1}, "both train and weight; keep one"),
    ({"train": 1}, "train is 1; true or false is wanted"),
    ({"train": "no"}, 'train is "no"; true or false is wanted'),
    ({"weight": -0.5}, "weight is -0.5; a number of at least 0 is wanted"),
    ({"weight": True}, "weight is true; a number of at least 0 is wanted"),
    ({"weight": "1"}, 'weight is "1"; a number of at least 0 is wanted'),
    ({"weight": float("inf")}, "weight is Infinity; a number of at least 0 is wanted"),
    ({"weight": float("nan")}, "weight is NaN; a number of at least 0 is wanted"),
])
def test_weights_that_are_none(keys: dict[str, Any], text: str) -> None:
    assert fault(messages(USER, {**ANSWER, **keys})) == ("wrong_schema", f"turn 1 (assistant): {text}")


# --- tools ---------------------------------------------------------------------------------------------------

SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(("tools", "want"), [
    (None, None), ([], None), ("", None), (" ", None), ("[]", None), ("null", None),
    ([SCHEMA], [SCHEMA]), (json.dumps([SCHEMA]), [SCHEMA]),
    ([SCHEMA["function"]], [SCHEMA]), ([{"function": SCHEMA["function"]}], [SCHEMA]),
])
def test_tools(tools: Any, want: Any) -> None:
    assert chat(messages(*PAIR, tools=tools)).tools == want


@pytest.mark.parametrize(("tools", "text"), [
    ("{", "tools: not valid JSON: Expecting property name enclosed in double quotes at character 2, near \"{\""),
    ({"name": "f"}, 'tools is an object ({"name": "f"}); a list of schemas is wanted'),
    ([{"type": "code"}], 'tools[0] is {"type": "code"}; wanted is {"type": "function", "function": '
                         '{"name": ..., "parameters": ...}} or its inner object'),
    (["f"], 'tools[0] is "f"; wanted is {"type": "function", "function": {"name": ..., "parameters": ...}} '
            "or its inner object"),
], ids=range(4))
def test_bad_tools(tools: Any, text: str) -> None:
    assert fault(messages(*PAIR, tools=tools)) == ("bad_tools", text)


@pytest.mark.parametrize("call", [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    {"id": "1", "function": {"arguments": {"a": 1}, "name": "f"}, "index": 0},
    {"id": "1", "name": "f", "arguments": '{"a": 1}'},
])
def test_tool_calls_come_out_alike(call: dict[str, Any]) -> None:
    got = chat(messages(USER, {"role": "assistant", "content": None, "tool_calls": [call]})).messages[1]
    assert json.dumps(got) == (
        '{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", '
        '"function": {"name": "f", "arguments": {"a": 1}}}]}')


@pytest.mark.parametrize(("calls", "text"), [
    ({"name": "f"}, 'tool_calls is an object ({"name": "f"}); a list is wanted'),
    (["f"], 'tool call 0 is "f"; wanted is {"function": {"name": ..., "arguments": {...}}}'),
    ([{"function": {"arguments": {}}}], 'tool call 0 is {"function": {"arguments": {}}}; wanted is '
                                        '{"function": {"name": ..., "arguments": {...}}}'),
    ([{"name": "f", "arguments": "{"}], "tool call 0: the arguments: not valid JSON: Expecting property name enclosed "
                                        'in double quotes at character 2, near "{"'),
    ([{"name": "f", "arguments": "[1]"}], "tool call 0: the arguments are an array ([1]); an object, or its JSON "
                                          "text, is wanted"),
    ([{"name": "f"}], "tool call 0: the arguments are null (null); an object, or its JSON text, is wanted"),
    ([{"name": "f", "arguments": '{"a": "\\ud83d"}'}],
     "tool call 0: the arguments: a: character 1 is half a surrogate pair (\\ud83d), which is not text"),
], ids=range(7))
def test_bad_tool_calls(calls: Any, text: str) -> None:
    assert fault(messages(USER, {**ANSWER, "tool_calls": calls})) == ("bad_tools", f"turn 1 (assistant): {text}")


def test_a_function_call_that_is_not_json() -> None:
    kind, text = fault({"conversations": [{"from": "function_call", "value": "f(1)"}]})
    assert kind == "bad_tools" and text.startswith("turn 0 (function_call): not valid JSON: ")


def test_no_two_rows_share_an_object() -> None:
    text = json.dumps(messages(*PAIR, tools=json.dumps([SCHEMA])))
    first, second = chat(json.loads(text)), chat(json.loads(text))
    assert first.tools and second.tools and first.tools == second.tools
    first.tools[0]["function"]["parameters"]["x"] = 1
    first.messages[0]["content"] = ""
    assert second.tools == [SCHEMA] and second.messages[0] == USER


# --- answers that were cut off -------------------------------------------------------------------------------

@pytest.mark.parametrize(("value", "where"), [
    ({"prompt": "q", "completion": "a", "finish_reason": "length"}, "the row has finish_reason: length"),
    ({"messages": PAIR, "stop_reason": "max_tokens"}, "the row has stop_reason: max_tokens"),
    (messages(USER, {**ANSWER, "finish_reason": "MAX_TOKENS"}),
     "turn 1 (assistant) has finish_reason: MAX_TOKENS"),
])
def test_truncated_answers(value: dict[str, Any], where: str) -> None:
    assert fault(value) == ("truncated_answer", f"{where}, so its answer stops short")


def test_other_finish_reasons_are_fine() -> None:
    assert chat(messages({**USER, "finish_reason": "length"}, ANSWER, finish_reason="stop", stop_reason=None)) == Chat(
        PAIR, [1.0, 1.0])


# --- text ----------------------------------------------------------------------------------------------------

def test_text() -> None:
    assert text_of({"text": " a\r\n"}, source()) == " a\r\n"
    assert text_of({"body": "a", "text": 3}, source(columns={"text": "body"})) == "a"


@pytest.mark.parametrize(("value", "kind", "text"), [
    ({"text": None}, "null_content", "text is null or missing"),
    ({"text": " \n"}, "empty_text", "text has nothing but white space"),
    ({"text": ["a"]}, "wrong_schema", 'text is an array (["a"]); text is wanted'),
])
def test_text_that_is_none(value: dict[str, Any], kind: str, text: str) -> None:
    with pytest.raises(RowFault) as caught:
        text_of(value, source())
    assert (caught.value.kind, caught.value.text) == (kind, text)
