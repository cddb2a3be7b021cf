"""cases.md, theme 3, templates: from files to examples. (B15 to B20 are in test_theme3.py.)

B22, B23, B25 and B27 on single conversations are in unit/data/mask, B24, B26 and B28 as read in test_theme9_reading.py.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from cases.sft import CHATML, TOKENS, Checked, found, learnt, row
from shardwise.config.schema import FaultConfig

# --- B22 spans at the edges -------------------------------------------------------------------------------------------

def test_b22_an_answer_of_one_token_and_a_terminator_that_eats_white_space(checked: Checked) -> None:
    tokenizer = copy.deepcopy(TOKENS)
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in parts["added_tokens"]:
        token["rstrip"] = True
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(parts))
    _, examples = checked([row("q", "a", "r", "b"), row("q", "b")], tokenizer=tokenizer)
    for number, answers in ((0, ["a", "b"]), (1, ["b"])):
        ids, weights = examples.get([number])[0]
        assert tokenizer.decode(ids[weights > 0]) == "".join(f"{answer}<|im_end|>" for answer in answers)
        assert int((weights > 0).sum()) == 2 * len(answers)  # one for the answer, one for its end


def test_b22_cut_in_the_middle_of_an_answer(checked: Checked) -> None:
    rows = [row("q", "first", "r", "a second answer that is long"), row("q", "short")]
    _, whole = checked(rows)
    ids, weights = whole.get([0])[0]
    report, cut = checked(rows, max_length=len(ids) - 4, on_too_long="truncate")
    assert report["train"]["truncated"] == 1 and report["ok"]
    got_ids, got_weights = cut.get([0])[0]
    assert got_ids.tolist() == ids[:-4].tolist() and got_weights.tolist() == weights[:-4].tolist()
    assert got_weights[-1] == 1 and learnt(cut, 1) == "short<|im_end|>"


# --- B23 template without assistant markers ---------------------------------------------------------------------------

def test_b23_no_tags_are_needed_and_the_share_is_told(checked: Checked) -> None:
    assert "generation %" not in CHATML
    report, examples = checked([row("hi", "yes")])
    assert report["train"]["supervised_share"] == round(int(examples.supervised[0]) / int(examples.lengths[0]), 6)
    assert 0 < report["train"]["supervised_share"] < 1


@pytest.mark.parametrize(("template", "kind"), [
    ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "mask_disagreement"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "mask_disagreement"),
    ("{{ messages[0].content }}<|im_end|>", "text_lost")])
def test_b23_what_cannot_be_told_apart_stops_with_one_line(checked: Checked, template: str, kind: str) -> None:
    report, examples = checked([row("hi", "yes")], template=template)
    assert found(report) == [(kind, [1])] and len(examples) == 0 and not report["ok"]


# --- B24, B25 rows that a template refuses ----------------------------------------------------------------------------

def test_b24_an_empty_answer_teaches_its_end_alone(checked: Checked) -> None:
    report, examples = checked([row("q", ""), row("q", "a")], on_fault=FaultConfig(empty_turn="report"))
    assert report["ok"] and found(report) == [("empty_turn", [1])]
    assert [learnt(examples, n) for n in (0, 1)] == ["<|im_end|>", "a<|im_end|>"]
    assert "None" not in TOKENS.decode(examples.get([0])[0][0])


STRICT = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
          "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}"
          "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
          "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.mark.parametrize(("bad", "said"), [
    (row("q", "a", system="s"), "System role not supported"),
    ({"messages": [*row("q")["messages"], *row("q", "a")["messages"]]}, "Conversation roles must alternate")])
def test_b25_one_bad_row_in_ten(checked: Checked, bad: dict[str, Any], said: str) -> None:
    rows = [row(f"q{n}", f"a{n}") for n in range(9)]
    report, examples = checked([*rows[:4], bad, *rows[4:]], template=STRICT,
                               on_fault=FaultConfig(template_refused="drop"))
    assert report["ok"] and found(report) == [("template_refused", [5])] and said in str(report["findings"])
    assert [learnt(examples, n) for n in range(len(examples))] == [f"a{n}<|im_end|>" for n in range(9)]


# --- B26 tool schemas and arguments -----------------------------------------------------------------------------------

TOOLS = ("{% if tools %}{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
         "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tool_row(name: str, parameter: str, *, as_text: bool = False) -> dict[str, Any]:
    arguments: Any = {parameter: "x"}
    call = {"function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}}
    schema = {"name": name, "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}}}
    return {"tools": [schema], "messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "result"}, {"role": "assistant", "content": "done"}]}


def test_b26_each_row_shows_its_own_tools_and_learns_its_calls(checked: Checked) -> None:
    rows = [tool_row("fun", "city"), tool_row("gun", "query"), tool_row("fun", "city", as_text=True)]
    _, examples = checked(rows, template=TOOLS)
    first, second, third = (examples.get([n])[0][0].tolist() for n in range(3))
    text = TOKENS.decode(first)
    assert "query" not in text and "null" not in text and "city" in text and "query" in TOKENS.decode(second)
    assert first == third  # arguments as an object and as its text
    assert learnt(examples, 0) == '{"name": "fun", "arguments": {"city": "x"}}<|im_end|>done<|im_end|>'


# --- B27 hidden default system prompt ---------------------------------------------------------------------------------

def test_b27_a_default_system_text_is_there_and_not_learnt(checked: Checked) -> None:
    default = ("{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}" + CHATML)
    rows = [row("q", "a"), row("q", "a", system="Be brief.")]
    _, examples = checked(rows, template=default)
    for number, chat in enumerate(rows):
        assert examples.get([number])[0][0].tolist() == TOKENS.apply_chat_template(
            chat["messages"], chat_template=default, return_dict=False)
        assert learnt(examples, number) == "a<|im_end|>"
    assert "You are kind." in TOKENS.decode(examples.get([0])[0][0])
    assert "You are kind." not in TOKENS.decode(examples.get([1])[0][0])


# --- B28 emoji, CRLF, U+2028, NEL -------------------------------------------------------------------------------------

STRANGE = ["one\u2028two\u2029", "one\u0085two", "\U0001f600 one", "one\r\ntwo\rthree"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_b28_answers_are_learnt_byte_for_byte(checked: Checked, end: str) -> None:
    lines = "".join(json.dumps(row("q", text), ensure_ascii=False) + end for text in STRANGE)
    _, examples = checked(lines.encode())
    assert [learnt(examples, n) for n in range(len(examples))] == [f"{text}<|im_end|>" for text in STRANGE]
    ids, weights = examples.get([2])[0]
    emoji = TOKENS("\U0001f600", add_special_tokens=False)["input_ids"]
    start = int(weights.argmax())
    assert len(emoji) == 4 and ids[start:start + 4].tolist() == emoji and weights[start:start + 4].tolist() == [1] * 4
    assert [("\r" in TOKENS.decode(examples.get([n])[0][0])) for n in range(4)] == [False, False, False, True]
