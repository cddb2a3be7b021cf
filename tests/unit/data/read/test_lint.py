"""Conversations that are refused, each for one reason, and those beside them that are fine."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.data.faults import RowFault
from shardwise.data.read.lint import refuse
from shardwise.data.rows import Chat

CALL = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
PROMPT = "What is the capital of France???"  # 32 characters


def turn(role: str, content: str | None = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


USER, ANSWER, CALLS = turn("user"), turn("assistant"), turn("assistant", "", tool_calls=CALL)


def chat(*turns: dict[str, Any]) -> Chat:
    return Chat(list(turns), [1.0] * len(turns))


@pytest.mark.parametrize("turns", [
    (USER, ANSWER),
    (turn("system"), turn("developer"), USER, ANSWER, USER),
    (USER, USER, ANSWER, ANSWER),
    (USER, CALLS, turn("tool", ""), turn("tool"), ANSWER),
    (USER, CALLS, USER, turn("tool"), ANSWER),
    (USER, turn("assistant", " ", reasoning_content="r")),
    (USER, turn("assistant", "", tool_calls=[]) | {"content": "x"}),
    (turn("user", PROMPT), turn("assistant", PROMPT)),  # nothing beyond the prompt: it was asked to repeat
    (turn("user", PROMPT), turn("assistant", PROMPT[:-1] + "!!")),
    (turn("user", PROMPT[1:]), turn("assistant", PROMPT[1:] + " Paris")),  # 31 characters: may be chance
    (turn("user", PROMPT), ANSWER, USER, turn("assistant", PROMPT + " Paris")),
])
def test_fine(turns: tuple[dict[str, Any], ...]) -> None:
    refuse(chat(*turns))


@pytest.mark.parametrize(("turns", "kind", "text"), [
    ((), "no_messages", "the conversation has no message"),
    ((turn("system"),), "no_messages", "no assistant turn, so there is nothing to learn from (roles: system)"),
    ((USER, USER), "no_messages", "no assistant turn, so there is nothing to learn from (roles: user, user)"),
    ((USER, turn("assistant", None)), "null_content", "turn 1 (assistant): content is null or missing"),
    ((USER, turn("assistant", None, tool_calls=CALL)), "null_content",
     "turn 1 (assistant): content is null or missing"),
    ((USER, {"role": "assistant"}), "null_content", "turn 1 (assistant): content is null or missing"),
    ((turn("user", None), ANSWER), "null_content", "turn 0 (user): content is null or missing"),
    ((USER, CALLS, turn("tool", None)), "null_content", "turn 2 (tool): content is null or missing"),
    ((USER, turn("asistant")), "unknown_role",
     'turn 1: unknown role "asistant"; did you mean assistant? Known: system, developer, user, assistant, tool. '
     "Say who it is with roles: {asistant: assistant}"),
    ((turn("human"), ANSWER), "unknown_role",
     'turn 0: unknown role "human"; did you mean user? Known: system, developer, user, assistant, tool. '
     "Say who it is with roles: {human: user}"),
    ((turn("narrator"), ANSWER), "unknown_role",
     'turn 0: unknown role "narrator"; Known: system, developer, user, assistant, tool. '
     "Say who it is with roles: {narrator: user, assistant, system or tool}"),
    ((ANSWER, USER), "role_order", "turn 0 (assistant): an answer before any user turn"),
    ((turn("system"), ANSWER, USER, ANSWER), "role_order", "turn 1 (assistant): an answer before any user turn"),
    ((USER, turn("system"), ANSWER), "role_order",
     "turn 1 (system): comes after a turn of the conversation; it belongs at the start"),
    ((USER, ANSWER, turn("developer")), "role_order",
     "turn 2 (developer): comes after a turn of the conversation; it belongs at the start"),
    ((USER, turn("tool"), ANSWER), "role_order",
     "turn 1 (tool): a tool result, but no assistant turn before it calls a tool"),
    ((turn("user", f" {PROMPT}\n"), turn("assistant", f"{PROMPT} Paris.")), "prompt_trained",
     f'turn 1 (assistant): begins with the whole prompt ("{PROMPT}"), which would be trained as part of the answer; '
     "keep the answer alone"),
    ((USER, turn("assistant", tool_calls="f")), "bad_tools",
     'turn 1 (assistant): tool_calls is "f"; wanted is a list of {"function": {"name": ..., "arguments": {...}}}'),
    ((USER, turn("assistant", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])), "bad_tools",
     'turn 1 (assistant): tool_calls is [{"function": {"name": "f", "arguments":; wanted is a list of '
     '{"function": {"name": ..., "arguments": {...}}}'),
    ((turn("user", tool_calls=CALL), ANSWER), "bad_tools", "turn 0 (user): only an assistant calls tools"),
], ids=range(20))
def test_refused(turns: tuple[dict[str, Any], ...], kind: str, text: str) -> None:
    with pytest.raises(RowFault) as caught:
        refuse(chat(*turns))
    assert (caught.value.kind, caught.value.text) == (kind, text)


def test_a_long_conversation_takes_no_longer_than_its_length() -> None:
    refuse(chat(*[USER, CALLS, turn("tool"), ANSWER] * 20_000))


@pytest.mark.parametrize("turns", [(USER, turn("assistant", "")), (turn("user", " \n\u3000"), ANSWER),
                                   (turn("system", ""), USER, ANSWER)])
def test_an_empty_turn_is_noted(turns: tuple[dict[str, Any], ...]) -> None:
    assert refuse(chat(*turns)).notes == ("empty_turn",)
    assert refuse(chat(USER, ANSWER)).notes == ()
