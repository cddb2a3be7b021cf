"""docs/config.md, made from schema.py: `python -m shardwise.config.reference > docs/config.md`."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

from shardwise.config import schema
from shardwise.config.show import flow

HEAD = """# Every setting

Made from `src/shardwise/config/schema.py` by `python -m shardwise.config.reference`; a test keeps it current.
Set one in a recipe, or after it as `section.key=value`, `--section.key=value` or `--section.key value`.
`shardwise config RECIPE` shows what a run will use and where each value comes from.
"""


CLASSES = {node.name: node for node in ast.parse(Path(schema.__file__).read_text(encoding="utf-8")).body
           if isinstance(node, ast.ClassDef)}


def markdown() -> str:
    """The whole page."""
    lines, classes = [HEAD], CLASSES
    plain = []
    for field in dataclasses.fields(schema.Config):
        section = schema.Config.__annotations__[field.name]
        if section in classes:
            lines += [f"## {field.name}", *_rows(classes[section], getattr(schema, section), f"{field.name}."), ""]
        else:
            plain.append(field.name)
    top = [row for row in _rows(classes["Config"], schema.Config, "") if row.split("`")[1] in plain]
    lines += ["## At the top level", *top, "", "## In `data.train` and `data.eval`",
              *_rows(classes["SourceConfig"], schema.SourceConfig, ""), ""]
    return "\n".join(lines)


def _rows(node: ast.ClassDef, cls: type, prefix: str) -> list[str]:
    rows = []
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) \
                and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            name = statement.target.id
            default = next(f.default for f in dataclasses.fields(cls) if f.name == name)
            meaning = " ".join(str(after.value.value).split())
            inner = CLASSES.get(getattr(statement.annotation, "id", ""))
            shown = "" if inner else f" (default `{flow(default)}`)"
            rows.append(f"- `{prefix}{name}`{shown}: {meaning}")
            if inner:
                rows.append(f"  {' '.join((ast.get_docstring(inner) or '').split())}")
                rows += [f"  {row}" for row in _rows(inner, getattr(schema, inner.name), f"{prefix}{name}.")]
    return rows


if __name__ == "__main__":
    print(markdown(), end="")
