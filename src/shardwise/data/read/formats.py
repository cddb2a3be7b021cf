"""What a row means: which of the known formats it is in, and its conversation in the one shape of `Chat`. Pure."""

from __future__ import annotations

import difflib
from typing import Any

from shardwise.config.schema import SourceConfig
from shardwise.data.faults import RowFault
from shardwise.data.read import tools, turns
from shardwise.data.read.jsontext import names, printable, shown, type_of
from shardwise.data.rows import Chat

NEEDED = {"messages": ("messages",), "conversations": ("conversations",),
          "prompt_completion": ("prompt", "completion"), "instruction": ("instruction", "output"), "text": ("text",)}
"""Format -> the columns it cannot do without, in the order in which they are looked for."""
OF_TASK = {"sft": ("messages", "conversations", "prompt_completion", "instruction"), "pretrain": ("text",)}
COLUMNS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "system",
           "tools", "history", "role", "content", "from", "value")
"""The names that `columns` may map to others."""
_LIKELY = {
    "messages": ("conversations", "conversation", "dialogue", "dialog", "chat", "turns"),
    "conversations": ("messages", "conversation"),
    "prompt": ("question", "query", "user", "problem", "input", "instruction"),
    "completion": ("response", "answer", "reply", "assistant", "output", "target", "solution", "chosen"),
    "instruction": ("task", "question"), "output": ("response", "answer"),
    "text": ("content", "body", "document", "passage", "article"),
}


def detect(value: dict[str, Any], source: SourceConfig, task: str) -> str:
    """The format of a row, which `source.format` may name outright. Raises RowFault wrong_schema.

    A column that is null counts as missing where another format fits: a table that merges several data sets
    has the columns of all of them.
    """
    formats = OF_TASK[task] if source.format == "auto" else (source.format,)
    if source.format != "auto" and source.format not in OF_TASK[task]:
        raise RowFault("wrong_schema", f"format: {source.format} is not for data.task={task}, which reads "
                                       f"{' or '.join(OF_TASK[task])}")
    for full in (True, False):
        for name in formats:
            keys = [_name(source, column) for column in NEEDED[name]]
            if all(key in value and not (full and value[key] is None) for key in keys):
                return name
    found = names(value) or "none"
    wanted = "; ".join(f"{name}: {', '.join(_wanted(source, column) for column in NEEDED[name])}" for name in formats)
    raise RowFault("wrong_schema", f"no known format fits. Columns found: {found}. Wanted: {wanted}"
                                   f"{_way_out(value, formats, task)}")


def chat_of(value: dict[str, Any], source: SourceConfig, format: str) -> Chat:
    """The conversation of a row. Raises RowFault wrong_schema, no_messages, bad_tools or truncated_answer.

    A content that is null stays None, which lint.refuse refuses, but for an assistant turn with tool calls.
    """
    turns.refuse_truncated(value, "the row")
    if format in ("messages", "conversations"):
        pairs = turns.of_list(_get(value, source, format), source, format, format)
    elif format == "prompt_completion":
        pairs = [pair for column, role in (("prompt", "user"), ("completion", "assistant"))
                 for pair in _side(_get(value, source, column), source, column, role)]
    else:
        pairs = _instruction(value, source)
    messages, weights = [message for message, _ in pairs], [weight for _, weight in pairs]
    system = _text(_get(value, source, "system"), _name(source, "system")) or ""
    if system.strip():
        if messages and messages[0]["role"] == "system" and messages[0]["content"] != system:
            raise RowFault("wrong_schema", f"two system texts: column {_name(source, 'system')} ({shown(system)}) and "
                                           f"turn 0 ({shown(messages[0]['content'])})")
        if not messages or messages[0]["role"] != "system":
            messages, weights = [turns.plain("system", system), *messages], [1.0, *weights]
    return Chat(messages, weights, tools.schemas_of(_get(value, source, "tools")))


def text_of(value: dict[str, Any], source: SourceConfig) -> str:
    """The text of a pretraining row. Raises RowFault wrong_schema, null_content or empty_text."""
    name = _name(source, "text")
    text = _text(_get(value, source, "text"), name)
    if text is None:
        raise RowFault("null_content", f"{name} is null or missing")
    if not text.strip():
        raise RowFault("empty_text", f"{name} has nothing but white space")
    return text


def _side(value: Any, source: SourceConfig, column: str, role: str) -> list[turns.Turn]:
    if isinstance(value, list):
        return turns.of_list(value, source, "messages", _name(source, column))
    return [(turns.plain(role, _text(value, _name(source, column))), 1.0)]


def _instruction(value: dict[str, Any], source: SourceConfig) -> list[turns.Turn]:
    instruction, more, output = (_text(_get(value, source, column), _name(source, column))
                                 for column in ("instruction", "input", "output"))
    asked = instruction
    if more and more.strip():
        asked = f"{instruction}\n\n{more}" if instruction and instruction.strip() else more
    texts = [("user", asked), ("assistant", output)]
    history = turns.as_list(_get(value, source, "history") or [], _name(source, "history"))
    for number, exchange in reversed(list(enumerate(history))):
        if not (isinstance(exchange, list) and len(exchange) == 2):
            raise RowFault("wrong_schema", f"history[{number}] is {shown(exchange)}; [question, answer] is wanted")
        question, answer = (_text(text, f"history[{number}]") for text in exchange)
        texts[:0] = [("user", question), ("assistant", answer)]
    return [(turns.plain(role, text), 1.0) for role, text in texts]


def _name(source: SourceConfig, column: str) -> str:
    return (source.columns or {}).get(column, column)


def _get(value: dict[str, Any], source: SourceConfig, column: str) -> Any:
    return value.get(_name(source, column))


def _text(value: Any, what: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise RowFault("wrong_schema", f"{what} is {type_of(value)} ({shown(value)}); text is wanted")


def _wanted(source: SourceConfig, column: str) -> str:
    name = _name(source, column)
    return name if name == column else f"{name} (as {column})"


def _way_out(value: dict[str, Any], formats: tuple[str, ...], task: str) -> str:
    other = "sft" if task == "pretrain" else "pretrain"
    for name in formats:
        mapping = _mapping(value, NEEDED[name])
        if mapping:
            pairs = (f"{ours}: {printable(theirs)}" for ours, theirs in mapping.items())
            return f". Perhaps columns: {{{', '.join(pairs)}}}"
    if any(all(column in value for column in NEEDED[name]) for name in OF_TASK[other]):
        return f". These columns are what data.task={other} reads"
    return ". Name them with columns: {OUR NAME: NAME IN THE FILE}"


def _mapping(value: dict[str, Any], needed: tuple[str, ...]) -> dict[str, str]:
    """Our names -> the columns that are probably meant; empty where one has no likely column."""
    free = {str(key).lower(): str(key) for key in value}
    mapping = {}
    for column in needed:
        near = difflib.get_close_matches(column, free, n=1, cutoff=0.8)
        key = next((name for name in (column, *near, *_LIKELY.get(column, ())) if name in free), None)
        if key is None:
            return {}
        mapping[column] = free.pop(key)
    return {ours: theirs for ours, theirs in mapping.items() if ours != theirs}
