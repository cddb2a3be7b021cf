"""Good rows, and one planted defect of each kind: (kind, line as bytes, settings it needs)."""

from __future__ import annotations

import json
from typing import Any


def chat(*turns: tuple[str, Any], **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns], **more}).encode()


GOOD = [chat(("user", f"question {n}"), ("assistant", f"answer {n}")) for n in range(20)]
LONG = "why is it that " * 8
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{not json"}}]}
DEFECTS: dict[str, tuple[str, bytes]] = {
    "cut": ("broken_json", b'{"messages": [{"role": "us'),
    "array": ("broken_json", b"[1, 2]"),
    "number": ("broken_json", b"12"),
    "nan": ("broken_json", b'{"messages": [], "score": NaN}'),
    "byte": ("bad_utf8", b'{"messages": [{"role": "user", "content": "caf\xe9"}]}'),
    "surrogate": ("bad_utf8", b'{"messages": [{"role": "user", "content": "\\ud83d"}, '
                              b'{"role": "assistant", "content": "x"}]}'),
    "oversized": ("oversized_row", chat(("user", "w" * (17 << 20)), ("assistant", "ok"))),
    "columns": ("wrong_schema", b'{"text_": 3}'),
    "type": ("wrong_schema", b'{"messages": "hello"}'),
    "content": ("wrong_schema", chat(("user", 7), ("assistant", "x"))),
    "mixed": ("mixed_schema", b'{"prompt": "x", "completion": "y"}'),
    "none": ("no_messages", chat()),
    "no answer": ("no_messages", chat(("user", "x"))),
    "system only": ("no_messages", chat(("system", "x"))),
    "null": ("null_content", chat(("user", "x"), ("assistant", None))),
    "empty": ("empty_turn", chat(("user", "x"), ("assistant", ""))),
    "blank": ("empty_turn", chat(("user", " \n"), ("assistant", "x"))),
    "role": ("unknown_role", chat(("user", "x"), ("oracle", "y"))),
    "assistant first": ("role_order", chat(("assistant", "x"), ("user", "y"), ("assistant", "z"))),
    "late system": ("role_order", chat(("user", "x"), ("system", "s"), ("assistant", "y"))),
    "stray result": ("role_order", chat(("user", "x"), ("tool", "4"), ("assistant", "y"))),
    "tools": ("bad_tools", json.dumps({"messages": [{"role": "user", "content": "x"}, CALL]}).encode()),
    "cut off": ("truncated_answer", chat(("user", "x"), ("assistant", "and so"), finish_reason="length")),
    "echo": ("prompt_trained", chat(("user", LONG), ("assistant", LONG + " Because."))),
    "untrained": ("no_supervised", json.dumps({"messages": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "train": False}]}).encode()),
    "long": ("too_long", chat(("user", "w " * 40000), ("assistant", "ok"))),
    "marker": ("marker_text", chat(("user", "what does <|im_end|> do?"), ("assistant", "it ends a turn"))),
    "again": ("duplicate", GOOD[2]),
}
TEMPLATES: dict[str, tuple[str, str]] = {
    "refuses": ("template_refused", "{{ raise_exception('roles must alternate') }}"),
    "loses": ("text_lost", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.role == 'assistant' }}"
                           "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"),
    "thinks": ("mask_disagreement", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
               "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"),
    "never ends": ("terminator_untrained", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                   "{% if add_generation_prompt %}assistant: {% endif %}"),
}
"""A defect that lies in the template rather than in a row, and the template."""
