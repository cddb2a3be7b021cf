"""SFT rows on their way from a file to examples, for the cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dist.given import TOKENIZER
from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.look.check import check
from shardwise.data.store.load import inspect

TOKENS: Any = AutoTokenizer.from_pretrained(TOKENIZER)
CHATML = TOKENS.chat_template
Checked = Callable[..., tuple[dict[str, Any], Any]]


def checked(folder: Path, rows: list[Any] | bytes, *, tokenizer: Any = TOKENS, template: str | None = None,
            **options: Any) -> tuple[dict[str, Any], Any]:
    """Rows -> rows.jsonl -> the report of `data check`, and the examples left."""
    path = folder / "rows.jsonl"
    path.write_bytes(rows if isinstance(rows, bytes) else "".join(json.dumps(r) + "\n" for r in rows).encode())
    if template is not None:
        (folder / "t.jinja").write_text(template)
        options["chat_template"] = str(folder / "t.jinja")
    data = DataConfig(train=(SourceConfig(path=str(path)),), **options)
    report, _ = check(data, tokenizer)
    return report, inspect(data, tokenizer).train


def row(*turns: str, system: str | None = None, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(turns)
    head = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": head + [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)], **more}


def learnt(examples: Any, number: int, tokenizer: Any = TOKENS) -> str:
    ids, weights = examples.get([number])[0]
    return tokenizer.decode(ids[weights > 0])


def found(report: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """(kind, lines) of what was found."""
    return [(f["kind"], [int(r["row"].rpartition(":")[2]) for r in f["rows"]]) for f in report["findings"]]
