"""Tool schemas and tool calls in one shape, however a row spells them. Pure."""

from __future__ import annotations

from typing import Any

from shardwise.data.faults import RowFault
from shardwise.data.read import jsontext
from shardwise.data.read.jsontext import shown


def schemas_of(value: Any) -> list[dict[str, Any]] | None:
    """The tools on offer from a list of schemas or its JSON text; None for none. Raises RowFault bad_tools."""
    if isinstance(value, str):
        value = _parsed(value, "tools") if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RowFault("bad_tools", f"tools is {jsontext.type_of(value)} ({shown(value)}); a list of schemas is wanted")
    return [_schema(schema, number) for number, schema in enumerate(value)]


def calls_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, from objects or JSON text. Raises RowFault bad_tools."""
    if not isinstance(value, list):
        raise RowFault("bad_tools", f"{where}: tool_calls is {jsontext.type_of(value)} ({shown(value)}); "
                                    "a list is wanted")
    return [_call(call, f"{where}: tool call {number}") for number, call in enumerate(value)]


def _schema(schema: Any, number: int) -> dict[str, Any]:
    wrapped = schema if isinstance(schema, dict) and "function" in schema else {"function": schema}
    function = wrapped["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault("bad_tools", f"tools[{number}] is {shown(schema)}; wanted is "
                                    '{"type": "function", "function": {"name": ..., "parameters": ...}} '
                                    "or its inner object")
    return {"type": "function", **wrapped}


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault("bad_tools", f'{where} is {shown(call)}; wanted is {{"function": {{"name": ..., '
                                    '"arguments": {...}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}: the arguments")
    if not isinstance(arguments, dict):
        raise RowFault("bad_tools", f"{where}: the arguments are {jsontext.type_of(arguments)} ({shown(arguments)}); "
                                    "an object, or its JSON text, is wanted")
    name = {"id": call["id"]} if call.get("id") is not None else {}
    return {**name, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _parsed(text: str, where: str) -> Any:
    try:
        return jsontext.value_of(text)
    except RowFault as fault:
        raise RowFault("bad_tools", f"{where}: {fault}") from None
