"""The spans that carry loss, for templates of every temper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardwise.data.chat import render_chat
from shardwise.errors import DataError

Messages = Sequence[dict[str, Any]]
TWO_TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"},
             {"role": "user", "content": "bye"}, {"role": "assistant", "content": "bye now"}]


def chatml(messages: Messages, generation: bool) -> str:
    text = "".join(f"<{m['role']}>{m['content']}<end>\n" for m in messages)
    return text + "<assistant>" * generation


def spans(messages: Messages, render: Callable[[Messages, bool], str], supervise: str = "all") -> list[str]:
    rendered = render_chat(messages, render, supervise=supervise, place="f.jsonl:3")
    return [rendered.text[start:end] for start, end in rendered.spans]


def test_a_turn_is_what_the_model_has_to_write() -> None:
    assert spans(TWO_TURNS, chatml) == ["hello there<end>\n", "bye now<end>\n"]


def test_the_last_turn_alone() -> None:
    assert spans(TWO_TURNS, chatml, supervise="last") == ["bye now<end>\n"]
    assert spans(TWO_TURNS[:3], chatml, supervise="last") == ["hello there<end>\n"]


def test_b19_a_last_turn_may_end_otherwise() -> None:
    """Middle turns end with <end>, the final one with <eos>; two assistant turns in a row."""
    def render(messages: Messages, generation: bool) -> str:
        last = len(TWO_TURNS)
        parts = [f"<{m['role']}>{m['content']}{'<eos>' if n + 1 == last else '<end>'}"
                 for n, m in enumerate(messages)]
        return "".join(parts) + "<assistant>" * generation

    assert spans(TWO_TURNS, render) == ["hello there<end>", "bye now<eos>"]
    in_a_row = [TWO_TURNS[0], TWO_TURNS[1], TWO_TURNS[1], TWO_TURNS[3]]
    assert spans(in_a_row, render) == ["hello there<end>", "hello there<end>", "bye now<eos>"]


def test_a_template_that_changes_earlier_turns_is_refused_by_turn() -> None:
    """One that drops the reasoning of all but the last answer, as several do."""
    def render(messages: Messages, generation: bool) -> str:
        parts = [f"<{m['role']}>{'thinking ' if m['role'] == 'assistant' and n + 1 == len(messages) else ''}"
                 f"{m['content']}<end>" for n, m in enumerate(messages)]
        return "".join(parts) + "<assistant>" * generation

    with pytest.raises(DataError, match=r"f\.jsonl:3: the chat template is not prefix-stable at turn 1: its output "
                                        r"up to this turn .*'thinking hello.*data\.chat_template=FILE"):
        spans(TWO_TURNS, render)


def test_a_generation_prompt_that_is_no_prefix_is_refused() -> None:
    def render(messages: Messages, generation: bool) -> str:
        return chatml(messages, False) + "<assistant><think></think>" * generation

    with pytest.raises(DataError, match="not prefix-stable at turn 1: its output before this turn"):
        spans(TWO_TURNS, render)


def test_b23_a_template_that_leaves_the_answer_out_is_refused() -> None:
    def render(messages: Messages, generation: bool) -> str:
        return "".join(f"<{m['role']}>{m['content'] if m['role'] == 'user' else ''}<end>" for m in messages) \
            + "<assistant>" * generation

    with pytest.raises(DataError, match=r"f\.jsonl:3: turn 1: the template does not print this answer"):
        spans(TWO_TURNS, render)


def test_b25_what_a_template_raises_names_the_row() -> None:
    def render(messages: Messages, generation: bool) -> str:
        raise ValueError("Conversation roles must alternate")

    with pytest.raises(DataError, match=r"f\.jsonl:3: the chat template refuses .*Conversation roles must alternate"):
        spans(TWO_TURNS, render)
