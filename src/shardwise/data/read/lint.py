"""Conversations that must not be trained on as they stand. Pure."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from shardwise.config.schema import ROLES
from shardwise.data.faults import RowFault
from shardwise.data.read.jsontext import printable, shown
from shardwise.data.read.turns import SPEAKERS
from shardwise.data.rows import Chat

_ECHO = 32
"""Characters of a prompt from which on an answer that begins with it is no coincidence."""
_FIRST = {"system", "developer"}
_CALL = "a tool call"


def refuse(chat: Chat) -> Chat:
    """The chat, with its usable faults noted. Raises RowFault for the first thing that makes it unusable."""
    if not chat.messages:
        raise RowFault("no_messages", "the conversation has no message")
    seen: set[str] = set()  # roles so far, and CALL once a tool was called
    prompt, empty = "", False
    for turn, message in enumerate(chat.messages):
        role = message["role"]
        where = f"turn {turn} ({role})"
        _refuse_role(role, turn)
        empty = _is_empty(message, where) or empty
        _refuse_calls(message, where)
        _refuse_order(seen, role, where)
        if role == "user":
            prompt = message["content"].strip()
        elif role == "assistant":
            _refuse_echo(prompt, message["content"].strip(), where)
        seen |= {role, _CALL} if message.get("tool_calls") else {role}
    if "assistant" not in seen:
        roles = ", ".join(message["role"] for message in chat.messages[:10])
        raise RowFault("no_messages", f"no assistant turn, so there is nothing to learn from (roles: {roles})")
    return replace(chat, notes=("empty_turn",)) if empty else chat


def _refuse_role(role: str, turn: int) -> None:
    if role in ROLES:
        return
    known = {**SPEAKERS, **{name: name for name in ROLES}}
    near = difflib.get_close_matches(role.lower(), known, n=1, cutoff=0.6)
    meant = known[near[0]] if near else "user, assistant, system or tool"
    hint = f"did you mean {meant}? " if near else ""
    raise RowFault("unknown_role", f"turn {turn}: unknown role {shown(role)}; {hint}Known: {', '.join(ROLES)}. "
                                   f"Say who it is with roles: {{{printable(role)}: {meant}}}")


def _is_empty(message: dict[str, Any], where: str) -> bool:
    content = message.get("content")
    if content is None:
        raise RowFault("null_content", f"{where}: content is null or missing")
    answer = message["role"] == "assistant" and bool(message.get("tool_calls") or message.get("reasoning_content"))
    return not content.strip() and not answer and message["role"] != "tool"


def _refuse_calls(message: dict[str, Any], where: str) -> None:
    if "tool_calls" not in message:
        return
    calls = message["tool_calls"]
    if message["role"] != "assistant":
        raise RowFault("bad_tools", f"{where}: only an assistant calls tools")
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise RowFault("bad_tools", f"{where}: tool_calls is {shown(calls)}; wanted is a list of "
                                    '{"function": {"name": ..., "arguments": {...}}}')


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (isinstance(function, dict) and isinstance(function.get("name"), str)
            and isinstance(function.get("arguments"), dict))


def _refuse_order(seen: set[str], role: str, where: str) -> None:
    """Two turns of one speaker in a row are fine: many templates print them."""
    if role == "assistant" and "user" not in seen:
        raise RowFault("role_order", f"{where}: an answer before any user turn")
    if role in _FIRST and seen - _FIRST:
        raise RowFault("role_order", f"{where}: comes after a turn of the conversation; it belongs at the start")
    if role == "tool" and _CALL not in seen:
        raise RowFault("role_order", f"{where}: a tool result, but no assistant turn before it calls a tool")


def _refuse_echo(prompt: str, answer: str, where: str) -> None:
    if _ECHO <= len(prompt) < len(answer) and answer.startswith(prompt):
        raise RowFault("prompt_trained", f"{where}: begins with the whole prompt ({shown(prompt)}), which would be "
                                         "trained as part of the answer; keep the answer alone")
