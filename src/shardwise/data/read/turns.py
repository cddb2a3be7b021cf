"""Turns of a conversation as rows spell them (role/content, from/value) in the shape a chat template gets. Pure."""

from __future__ import annotations

from typing import Any

from shardwise.config.schema import SourceConfig
from shardwise.data.faults import RowFault
from shardwise.data.read import jsontext, tools
from shardwise.data.read.jsontext import names, printable, shown, type_of

Turn = tuple[dict[str, Any], float]
"""A message and its loss weight."""
KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}
SPEAKERS = {
    "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bot": "assistant", "model": "assistant",
    "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
}
"""Who speaks in a `conversations` row -> role."""
FUNCTION_CALL = "function_call"
"""The speaker of a `conversations` turn whose text is the JSON of a tool call."""
_CUT_OFF = ("length", "max_tokens")


EXTRAS = {"tool_call_id": "tool_call_id", "name": "name", "reasoning_content": "reasoning_content",
          "reasoning": "reasoning_content", "thinking": "reasoning_content"}
"""What else a message may hold -> what templates are given (which know the thoughts by all three names)."""


def plain(role: str, content: str | None) -> dict[str, Any]:
    """A message of text alone."""
    return {"role": role, "content": content}


def of_list(value: Any, source: SourceConfig, format: str, what: str) -> list[Turn]:
    """The turns of a list (or its JSON text) of messages or of conversations. Raises RowFault."""
    if value is None:
        raise RowFault("no_messages", f"{what} is null")
    return [_turn(turn, source, format, index) for index, turn in enumerate(as_list(value, what))]


def as_list(value: Any, what: str) -> list[Any]:
    """A list, or the list that a JSON text holds, which is how a table of text cells has it. Raises RowFault."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = jsontext.value_of(value)
        except RowFault as fault:
            raise RowFault(fault.kind, f"{what}: {fault}") from None
    if not isinstance(value, list):
        raise RowFault("wrong_schema", f"{what} is {type_of(value)} ({shown(value)}); a list is wanted")
    return value


def refuse_truncated(value: dict[str, Any], where: str) -> None:
    """Raises RowFault truncated_answer where the source says that its token limit ended the answer."""
    for key in ("finish_reason", "stop_reason"):
        reason = value.get(key)
        if isinstance(reason, str) and reason.lower() in _CUT_OFF:
            raise RowFault("truncated_answer", f"{where} has {key}: {reason}, so its answer stops short")


def _turn(turn: Any, source: SourceConfig, format: str, index: int) -> Turn:
    if not isinstance(turn, dict):
        raise RowFault("wrong_schema", f"turn {index} is {type_of(turn)} ({shown(turn)}); an object is wanted")
    role_key, content_key = _keys(source, format)
    said = turn.get(role_key)
    if not isinstance(said, str):
        raise RowFault("wrong_schema", f"turn {index}: {role_key} is {shown(said)}; text is wanted. Found: "
                                       f"{names(turn) or 'no key'}{_other_keys(turn, source, format)}")
    where = f"turn {index} ({printable(said)})"
    role = _role(said, source, format)
    content = _content(turn.get(content_key), where, content_key)
    message: dict[str, Any] = {"role": role, "content": content}
    if role == FUNCTION_CALL:
        message = {"role": "assistant", "content": "", "tool_calls": _function_calls(content, where)}
    elif turn.get("tool_calls"):
        message |= {"content": content or "", "tool_calls": tools.calls_of(turn["tool_calls"], where)}
    if len(turn) > 2:
        message |= _extras(turn, where)
    if message["role"] == "assistant":
        refuse_truncated(turn, where)
    return message, _weight(turn, where)


def _extras(turn: dict[str, Any], where: str) -> dict[str, str]:
    extras = {}
    for key, name in EXTRAS.items():
        if turn.get(key) is not None:
            if not isinstance(turn[key], str):
                raise RowFault("wrong_schema", f"{where}: {key} is {shown(turn[key])}; text is wanted")
            extras[name] = turn[key]
    return extras


def _keys(source: SourceConfig, format: str) -> tuple[str, str]:
    columns, (role, content) = source.columns or {}, KEYS[format]
    return (columns.get(role) or columns.get("role") or columns.get("from") or role,
            columns.get(content) or columns.get("content") or columns.get("value") or content)


def _other_keys(turn: dict[str, Any], source: SourceConfig, format: str) -> str:
    other = "messages" if format == "conversations" else "conversations"
    column = (source.columns or {}).get(format, format)
    fits = all(key in turn for key in KEYS[other])
    return f". To read them as {other}: columns: {{{other}: {column}}}" if fits else ""


def _role(said: str, source: SourceConfig, format: str) -> str:
    roles = source.roles or {}
    if said in roles or format == "messages":
        return roles.get(said, said)
    return SPEAKERS.get(said, said)


def _content(value: Any, where: str, key: str) -> str | None:
    """Text, the text of OpenAI's content parts, or None."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowFault("wrong_schema", f"{where}: {key} is {type_of(value)} ({shown(value)}); text is wanted")
    texts = []
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RowFault("wrong_schema", f"{where}: part {number} of {key} is {shown(part)}; only parts of "
                                           '{"type": "text", "text": ...} are trained on')
        texts.append(text)
    return "".join(texts)


def _function_calls(content: str | None, where: str) -> list[dict[str, Any]]:
    try:
        value = jsontext.value_of(content or "")
    except RowFault as fault:
        raise RowFault("bad_tools", f"{where}: {fault}") from None
    return tools.calls_of(value if isinstance(value, list) else [value], where)


def _weight(turn: dict[str, Any], where: str) -> float:
    train, weight = turn.get("train"), turn.get("weight")
    if train is not None and weight is not None:
        raise RowFault("wrong_schema", f"{where}: both train and weight; keep one")
    if train is not None:
        if not isinstance(train, bool):
            raise RowFault("wrong_schema", f"{where}: train is {shown(train)}; true or false is wanted")
        return float(train)
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 3.4e38:  # nor NaN
        raise RowFault("wrong_schema", f"{where}: weight is {shown(weight)}; a number of at least 0 is wanted")
    return float(weight)
