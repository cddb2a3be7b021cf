"""Exactly the text that is learnt, and exactly the ids that stand before it when the model is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dist.given import TOKENIZER
from shardwise.data.encode import ChatEncoder, Encoded, text_ids
from shardwise.data.sources import RawRow
from shardwise.errors import DataError

TOKENS: Any = AutoTokenizer.from_pretrained(TOKENIZER)
Messages = list[dict[str, Any]]
TWO_TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"},
             {"role": "user", "content": "bye"}, {"role": "assistant", "content": "bye now"}]
BAD_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n"
                "{% if m.role == 'assistant' and loop.last %}(final) {% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def encoded(messages: Messages, *, template: str | None = None, supervise: str = "all") -> Encoded:
    row = RawRow(json.dumps({"messages": messages}), "json", "chats.jsonl:7")
    return ChatEncoder(TOKENS, template=template, supervise=supervise)([row])[0]


def learnt(result: Encoded) -> str:
    return TOKENS.decode([i for i, flag in zip(*result, strict=True) if flag])


def asked(messages: Messages) -> list[int]:
    """The ids of a conversation that the model is to continue."""
    return TOKENS.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def talk(answer: str, question: str = "hi") -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_the_supervised_text_is_the_answers_and_their_end() -> None:
    result = encoded(TWO_TURNS)
    assert learnt(result) == "hello there<|im_end|>bye now<|im_end|>"
    assert TOKENS.decode(result.ids) == TOKENS.apply_chat_template(TWO_TURNS, tokenize=False)


def test_b27_the_ids_are_the_tokenizers_own_render() -> None:
    assert encoded(TWO_TURNS).ids == TOKENS.apply_chat_template(TWO_TURNS, return_dict=False)


def test_the_last_answer_alone() -> None:
    assert learnt(encoded(TWO_TURNS, supervise="last")) == "bye now<|im_end|>"


def test_the_end_is_learnt_and_the_newline_after_it_is_not() -> None:
    result = encoded(talk("yes"))
    assert TOKENS.decode(result.ids[-2:]) == "<|im_end|>\n"
    assert result.supervised[-2:] == [1, 0]


def test_b24_an_empty_answer_teaches_only_to_stop() -> None:
    assert learnt(encoded(talk(""))) == "<|im_end|>"


@pytest.mark.parametrize("answer", ["  They\tare   kept  ", "\n\nafter blank lines", " ", "\n", "\r\nline\r\n",
                                    "🌻 first", " next line", " leading no-break space"])
def test_an_answer_that_would_join_the_prompt_is_cut_from_it(answer: str) -> None:
    result = encoded(talk(answer))
    assert learnt(result) == f"{answer}<|im_end|>"
    first = result.supervised.index(1)
    assert result.ids[:first] == asked(talk(answer)[:1])


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text(" \t\n\r.a🙂'", max_size=8)


@given(answer=TEXT, question=TEXT)
@example(answer=" x", question="y ")
@example(answer="\n", question="\n")
def test_whatever_is_said(answer: str, question: str) -> None:
    """The learnt text is the answer byte for byte; before it stand the very ids of the prompt."""
    result = encoded(talk(answer, question))
    assert learnt(result) == f"{answer}<|im_end|>"
    assert result.ids[:result.supervised.index(1)] == asked(talk(answer, question)[:1])


@given(answers=st.lists(TEXT, min_size=2, max_size=4))
def test_every_answer_of_a_conversation(answers: list[str]) -> None:
    messages = [message for answer in answers for message in talk(answer)]
    assert learnt(encoded(messages)) == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_a_template_that_is_not_prefix_stable_is_refused_by_turn() -> None:
    with pytest.raises(DataError, match=r"chats\.jsonl:7: the chat template is not prefix-stable at turn 1"):
        encoded(TWO_TURNS, template=BAD_TEMPLATE)


@pytest.mark.parametrize("turn", [0, 1])
def test_control_tokens_as_text_are_refused(turn: int) -> None:
    messages = talk("fine")
    messages[turn]["content"] = "stop<|im_end|>now"
    with pytest.raises(DataError, match=rf"chats\.jsonl:7: turn {turn} contains the control token '<\|im_end\|>'"):
        encoded(messages)


def test_what_only_looks_like_a_control_token_is_text() -> None:
    assert learnt(encoded(talk("<im_start> and <|this|>"))) == "<im_start> and <|this|><|im_end|>"


def test_documents_end_once() -> None:
    end = TOKENS.eos_token_id
    plain, ended = text_ids(TOKENS, ["a document", "another<|im_end|>"])
    assert plain[-1] == ended[-1] == end and plain.count(end) == ended.count(end) == 1
    assert TOKENS.decode(plain[:-1]) == "a document"
