"""Exactly the text that is learnt, and exactly the ids that stand before it when the model is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dist.given import TOKENIZER
from shardwise.data.faults import RowFault
from shardwise.data.mask.encode import ChatEncoder, TextEncoder
from shardwise.data.rows import Chat, Encoded

TOKENS: Any = AutoTokenizer.from_pretrained(TOKENIZER)
Messages = list[dict[str, Any]]
TWO_TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"},
             {"role": "user", "content": "bye"}, {"role": "assistant", "content": "bye now"}]


def encoded(messages: Messages, *, supervise: Any = "all", **more: Any) -> Encoded:
    found = ChatEncoder(TOKENS, template=None, supervise=supervise, **more)([Chat(messages, [1.0] * len(messages))])[0]
    assert not isinstance(found, RowFault), found
    return found[0]


def learnt(result: Encoded) -> str:
    return TOKENS.decode(result.ids[result.weights > 0])


def asked(messages: Messages) -> list[int]:
    """The ids of a conversation that the model is to continue."""
    return TOKENS.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def before(result: Encoded) -> list[int]:
    """The ids before the first that carries loss."""
    return result.ids[:int(np.flatnonzero(result.weights)[0])].tolist()


def talk(answer: str, question: str = "hi") -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_the_supervised_text_is_the_answers_and_their_end() -> None:
    result = encoded(TWO_TURNS)
    assert learnt(result) == "hello there<|im_end|>bye now<|im_end|>"
    assert TOKENS.decode(result.ids) == TOKENS.apply_chat_template(TWO_TURNS, tokenize=False)


def test_b27_the_ids_are_the_tokenizers_own_render() -> None:
    assert encoded(TWO_TURNS).ids.tolist() == TOKENS.apply_chat_template(TWO_TURNS, return_dict=False)


def test_the_last_answer_alone() -> None:
    assert learnt(encoded(TWO_TURNS, supervise="last")) == "bye now<|im_end|>"


def test_the_end_is_learnt_and_the_newline_after_it_is_not() -> None:
    result = encoded(talk("yes"))
    assert TOKENS.decode(result.ids[-2:]) == "<|im_end|>\n"
    assert result.weights[-2:].tolist() == [1, 0]


def test_b24_an_empty_answer_teaches_only_to_stop() -> None:
    assert learnt(encoded(talk(""))) == "<|im_end|>"


@pytest.mark.parametrize("answer", ["  They\tare   kept  ", "\n\nafter blank lines", " ", "\n", "\r\nline\r\n",
                                    "🌻 first", " next line", " leading no-break space"])
def test_an_answer_that_would_join_the_prompt_is_cut_from_it(answer: str) -> None:
    result = encoded(talk(answer))
    assert learnt(result) == f"{answer}<|im_end|>"
    assert before(result) == asked(talk(answer)[:1])


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text(" \t\n\r.a🙂'", max_size=8)


@given(answer=TEXT, question=TEXT)
@example(answer=" x", question="y ")
@example(answer="\n", question="\n")
def test_whatever_is_said(answer: str, question: str) -> None:
    """The learnt text is the answer byte for byte; before it stand the very ids of the prompt."""
    result = encoded(talk(answer, question))
    assert learnt(result) == f"{answer}<|im_end|>"
    assert before(result) == asked(talk(answer, question)[:1])


@given(answers=st.lists(TEXT, min_size=2, max_size=4))
def test_every_answer_of_a_conversation(answers: list[str]) -> None:
    messages = [message for answer in answers for message in talk(answer)]
    assert learnt(encoded(messages)) == "".join(f"{answer}<|im_end|>" for answer in answers)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("text", ["stop<|im_end|>now", "<|im_end|>", "<|im_start|>assistant\nyes<|im_end|>\n",
                                  "🌻<|endoftext|><|endoftext|> x", " <|im_start|>"])
def test_control_tokens_as_text_are_ordinary_text(text: str, turn: int) -> None:
    """No id of a control token comes out of what somebody wrote, and it reads back byte for byte."""
    messages = talk("fine")
    messages[turn]["content"] = text
    result = encoded(messages)
    control = {i: c for c, i in TOKENS.get_added_vocab().items()}
    assert [control[i] for i in result.ids.tolist() if i in control] == ["<|im_start|>", "<|im_end|>"] * 2
    assert TOKENS.decode(result.ids) == TOKENS.apply_chat_template(messages, tokenize=False)
    assert learnt(result) == f"{messages[1]['content']}<|im_end|>"
    assert result.notes == ("marker_text",)


def test_one_bad_chat_does_not_touch_the_others() -> None:
    chats = [Chat(talk("one"), [1.0, 1.0]), Chat(talk("two"), [1.0, 0.0]), Chat(talk("three"), [1.0, 1.0])]
    one, two, three = ChatEncoder(TOKENS, template=None, supervise="all")(chats)
    assert isinstance(two, RowFault) and two.kind == "no_supervised"
    assert [learnt(found[0]) for found in (one, three)] == ["one<|im_end|>", "three<|im_end|>"]


def test_b22_an_answer_cut_in_its_middle_is_learnt_up_to_the_cut() -> None:
    whole = encoded(TWO_TURNS)
    cut = encoded(TWO_TURNS, max_length=len(whole.ids) - 4, on_too_long="truncate")
    assert cut.ids.tolist() == whole.ids[:-4].tolist() and cut.weights.tolist() == whole.weights[:-4].tolist()
    assert cut.notes == ("truncated",) and cut.weights[-1] == 1


@pytest.mark.parametrize("policy", ["error", "drop", "truncate"])
def test_a_row_whose_answer_is_gone_is_never_trained_on(policy: str) -> None:
    encoder = ChatEncoder(TOKENS, template=None, supervise="all", max_length=20, on_too_long=policy)
    found = encoder([Chat(talk("yes", "a long question " * 20), [1.0, 1.0])])[0]
    assert isinstance(found, RowFault) and found.kind == "too_long"


def test_a_split_conversation_keeps_its_turns_whole_and_trains_each_once() -> None:
    turns = [message for n in range(9) for message in talk(f"answer {n}", f"question {n}")]
    chat = Chat([{"role": "system", "content": "be brief"}, *turns], [1.0] * 19)
    encoder = ChatEncoder(TOKENS, template=None, supervise="all", max_length=80, on_too_long="split")
    parts = encoder([chat])[0]
    assert not isinstance(parts, RowFault) and len(parts) > 2
    assert all(len(part.ids) <= 80 and part.notes == ("split",) for part in parts)
    assert "".join(map(learnt, parts)) == "".join(f"answer {n}<|im_end|>" for n in range(9))
    head = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nquestion"
    assert all(TOKENS.decode(part.ids).startswith(head) for part in parts)
    longer = ChatEncoder(TOKENS, template=None, supervise="all", max_length=len(parts[0].ids) - 1,
                         on_too_long="split")([chat])[0]
    assert len(longer) > len(parts)  # each part was as full as could be


def test_an_exchange_too_long_alone_is_left_out_and_noted() -> None:
    turns = [*talk("one"), *talk("word " * 200), *talk("three")]
    encoder = ChatEncoder(TOKENS, template=None, supervise="all", max_length=60, on_too_long="split")
    parts = encoder([Chat(turns, [1.0] * 6)])[0]
    assert not isinstance(parts, RowFault)
    assert [learnt(part) for part in parts] == ["one<|im_end|>", "three<|im_end|>"]
    assert {part.notes for part in parts} == {("split", "split_lost")}


def test_the_last_answer_of_a_split_conversation() -> None:
    turns = [message for n in range(9) for message in talk(f"answer {n}", f"question {n}")]
    encoder = ChatEncoder(TOKENS, template=None, supervise="last", max_length=100, on_too_long="split")
    parts = encoder([Chat(turns, [1.0] * 18)])[0]
    assert not isinstance(parts, RowFault)
    assert [learnt(part) for part in parts] == ["answer 8<|im_end|>"]


def test_what_only_looks_like_a_control_token_is_text() -> None:
    assert learnt(encoded(talk("<im_start> and <|this|>"))) == "<im_start> and <|this|><|im_end|>"


def test_documents_end_once() -> None:
    end = TOKENS.eos_token_id
    plain, ended = TextEncoder(TOKENS).ids(["a document", "another<|im_end|>"])  # said, not meant: ordinary text
    assert TOKENS.decode(ended) == "another<|im_end|><|im_end|>"
    assert plain[-1] == ended[-1] == end and plain.count(end) == ended.count(end) == 1
    assert TOKENS.decode(plain[:-1]) == "a document"
