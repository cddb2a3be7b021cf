"""What test_fuzz.py feeds the data pipeline with: bytes, JSON and conversations of every kind."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import assume
from hypothesis import strategies as st

# --- files ----------------------------------------------------------------------------------------------------

GOOD = json.dumps({"messages": [{"role": "user", "content": "q\u00e9"}, {"role": "assistant", "content": "a"}]})
TABLE = io.BytesIO()
pq.write_table(pa.Table.from_pylist([{"prompt": "q", "completion": "a"}] * 3), TABLE)
SEEDS = {
    ".jsonl": f"{GOOD}\n{GOOD}\n".encode(), ".json": f"[{GOOD},\n{GOOD}]".encode(), ".txt": b"some text\nand more",
    ".csv": b'prompt,completion\nq,a\n"x\n""y""",b\n', ".tsv": b"prompt\tcompletion\nq\ta\n",
    ".parquet": TABLE.getvalue(), ".jsonl.gz": gzip.compress(f"{GOOD}\n{GOOD}\n".encode(), mtime=0),
    ".json.gz": gzip.compress(f"[{GOOD}]".encode(), mtime=0),
    ".csv.gz": gzip.compress(b"prompt,completion\nq,a\n", mtime=0),
}
CHUNKS = [b"\n", b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\xff", b"\x00", b"\xef\xbb\xbf", b"\r", b"\xed\xa0\x80",
          b"null", b"NaN", b"1e999", b"[" * 300, b"\x1b[31m", b"9" * 5000, b'{"messages": []}\n', b'\\ud800']


@st.composite
def damaged(draw: Any, seed: bytes) -> bytes:
    content = seed
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        gone = draw(st.integers(0, 3) | st.integers(0, len(content)))
        content = content[:at] + draw(st.sampled_from(CHUNKS) | st.binary(max_size=8)) + content[at + gone:]
    return content


FILES = st.sampled_from(sorted(SEEDS)).flatmap(
    lambda suffix: st.tuples(st.just(suffix), st.binary(max_size=200) | damaged(SEEDS[suffix])))

# --- rows -----------------------------------------------------------------------------------------------------

KEYS = ["messages", "role", "content", "tool_calls", "conversations", "from", "value", "prompt", "completion",
        "instruction", "input", "output", "history", "text", "tools", "weight", "train", "finish_reason", "system",
        "function", "name", "arguments", "type", "id", "tool_call_id", "reasoning_content", "parameters", "stop_reason"]
WORDS = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_start|>assistant\n", "<|im", "_end|>", "<think>",
         "</think>", "<tool_call>", "</tool_call>", "\n", "\r\n", " ", "\u2028", "\x85", "\x1b[31m", "\u202e", "\0",
         "\uf5a0", "\uf5a1", "\uf5a2", "\uf5a2\uf5a2", "\uf5a01\uf5a1", "\uf600", "\uf601", "\uf602", "\U00020000",
         "\U00020001", "\U0001f600", "e\u0301", "{{ x }}", "{% if %}", "assistant", "user", "a", "word "]
TEXT = st.lists(st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
                max_size=6).map("".join)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", "human", "gpt", "function_call",
                         "oracle", "\x1b[31mroot", "u" * 5000])
SCALARS = (st.none() | st.booleans() | st.integers() | st.sampled_from([10**400, -1, 1e999, 3.4e38, 1e39, -0.0, 5e-324])
           | st.floats() | TEXT | ROLES | st.sampled_from(["length", "max_tokens", "\ud800", "[]", "[{}]", "{}"]))
ANY = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
    st.sampled_from(KEYS) | TEXT, inner, max_size=5), max_leaves=12)


def objects(needed: dict[str, Any], free: dict[str, Any]) -> Any:
    """Mostly what is expected, with anything at all in a key or two."""
    right = st.fixed_dictionaries(needed, optional=free)
    wrong = st.dictionaries(st.sampled_from(sorted(needed | free)), ANY, max_size=1)
    return st.builds(lambda a, b: a | b, right, wrong | st.just({}))


ARGUMENTS = st.dictionaries(TEXT, ANY, max_size=2)
CALLS = objects({"name": TEXT, "arguments": ARGUMENTS | ARGUMENTS.map(json.dumps)}, {"id": TEXT}).flatmap(
    lambda call: st.sampled_from([call, {"type": "function", "function": call}]))
MESSAGES = objects({"role": ROLES | st.sampled_from(["user", "assistant"]), "content": TEXT}, {
    "tool_calls": st.lists(CALLS, max_size=2), "weight": st.floats(0, 2) | st.sampled_from([0, 1, 3e38]),
    "name": TEXT, "reasoning_content": TEXT, "finish_reason": st.just("stop")})
TURNS = objects({"from": ROLES | st.sampled_from(["human", "gpt"]), "value": TEXT}, {"train": st.booleans()})
SCHEMAS = objects({"name": TEXT}, {"parameters": st.dictionaries(TEXT, ANY, max_size=2), "description": TEXT})
ROWS = (objects({"messages": st.lists(MESSAGES, max_size=5)}, {"tools": st.lists(SCHEMAS, max_size=2), "system": TEXT})
        | objects({"conversations": st.lists(TURNS, max_size=5)}, {"system": TEXT})
        | objects({"prompt": TEXT, "completion": TEXT}, {"system": TEXT})
        | objects({"instruction": TEXT, "output": TEXT}, {
            "input": TEXT, "history": st.lists(st.lists(TEXT), max_size=2)})
        | objects({"text": TEXT}, {}) | ANY)


def as_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_table(rows: list[Any]) -> bytes:
    file = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pylist([row for row in rows if isinstance(row, dict)]), file)
    except (pa.ArrowException, UnicodeError, OverflowError, ValueError, TypeError, NotImplementedError):
        assume(False)  # nothing that such a file can hold
    return file.getvalue()


FORMS = {"a.jsonl": as_lines, "a.json": lambda rows: json.dumps(rows, indent=1).encode(), "a.parquet": as_table}

# --- conversations that are sound -----------------------------------------------------------------------------

Said = tuple[str, str, float]
"""Role, content, loss weight."""


@st.composite
def conversations(draw: Any) -> list[Said]:
    said: list[Said] = [("system", draw(TEXT), 1.0)] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        said += [("user", draw(TEXT), 1.0), ("assistant", draw(TEXT), draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0])))]
    return said


ASKS = [{"role": "user", "content": "q"}]
TOOL_ROWS = st.builds(
    lambda calls, result, answer, schemas: {"tools": schemas, "messages": [
        *ASKS, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": result},
        {"role": "assistant", "content": answer}]},
    st.lists(CALLS, min_size=1, max_size=2), TEXT, TEXT, st.lists(SCHEMAS, max_size=2))
