"""One row of JSON, read strictly: what Python's reader lets pass and no template can print is refused here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from shardwise.data.faults import RowFault

LONGEST = 16 << 20
"""Most bytes of one row. A longer one is a file without line ends or a damaged one, and is never held whole."""
TOO_LONG = "a row of more than 16 MiB; split it, or set data.on_fault.oversized_row=drop"
BLANK = b" \t\r\n"
BOM = b"\xef\xbb\xbf"
_DEEPEST = 200  # far beyond any real row; what Python can parse at its limit, nobody can print or walk later
_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "a truth value", int: "a number",
          float: "a number", type(None): "null"}


def shown(value: object) -> str:
    """The first 40 characters of a value, for an error message."""
    return printable(json.dumps(value, ensure_ascii=False, default=str, skipkeys=True))


def printable(text: str, longest: int = 40) -> str:
    """The first characters of a text, with those that do not print (and may drive a terminal) spelt out."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[:longest])


def names(keys: Iterable[object]) -> str:
    """The first of an object's keys, for an error message."""
    found = [str(key) for key in keys]
    more = f" and {len(found) - 20:,} more" if len(found) > 20 else ""
    return f"{', '.join(printable(key) for key in found[:20])}{more}"


def type_of(value: object) -> str:
    """`an array`, `a number`, ...: what a value is in JSON's terms."""
    return _TYPES.get(type(value), f"a {type(value).__name__}")


def decoded(data: bytes) -> str:
    """Bytes as text. Raises RowFault naming the first byte that is not UTF-8, counted from 1."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowFault("bad_utf8", f"byte {error.start + 1} ({data[error.start]:#04x}) is not UTF-8") from None


def row_of(data: bytes) -> dict[str, Any]:
    """The object that these bytes hold. Raises RowFault broken_json, bad_utf8 or oversized_row."""
    if len(data) > LONGEST:
        raise RowFault("oversized_row", TOO_LONG)
    value = value_of(decoded(data))
    if not isinstance(value, dict):
        raise RowFault("broken_json", f"a row is a JSON object, not {type_of(value)}: {shown(value)}")
    return value


def value_of(text: str) -> Any:
    """The value of a JSON text. Raises RowFault broken_json, or bad_utf8 for half a surrogate pair."""
    try:
        value = _STRICT.decode(text)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20):error.pos + 20]
        raise RowFault("broken_json", f"not valid JSON: {error.msg} at character {error.pos + 1}, "
                                      f"near {printable(json.dumps(near, ensure_ascii=False), 100)}") from None
    except RecursionError:
        raise RowFault("broken_json", "not usable JSON: nested too deeply") from None
    except ValueError as error:  # NaN and its like; a number of more digits than Python converts
        raise RowFault("broken_json", f"not usable JSON: {str(error).partition(';')[0]}") from None
    if text.count("[") + text.count("{") > _DEEPEST and _depth(value) > _DEEPEST:
        raise RowFault("broken_json", f"not usable JSON: nested more than {_DEEPEST} deep")
    if _HALF_A_PAIR.search(text):
        _refuse_lone_surrogates(value)
    return value


def damage(text: str) -> int:
    """The character at which a text stops being JSON; 0 where it is damaged in no one place."""
    try:
        _STRICT.decode(text)
    except json.JSONDecodeError as error:
        return error.pos
    except (ValueError, RecursionError):
        pass
    return 0


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)  # kept: json.loads would build one for each row


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        level = [inner for outer in level if isinstance(outer, (dict, list))
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
        depth += 1
    return depth


def _refuse_lone_surrogates(value: Any, path: str = "") -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_lone_surrogates(key, f"a key of {path or 'the row'}")
            _refuse_lone_surrogates(inner, f"{path}.{printable(key)}" if path else printable(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_lone_surrogates(inner, f"{path}[{index}]")
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowFault("bad_utf8", f"{path or 'the text'}: character {error.start + 1} is half a surrogate pair "
                                       f"(\\u{ord(value[error.start]):04x}), which is not text") from None
