"""report.html: the curves of a run on one page that needs nothing else, to look at or to send to someone."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.export.runs import read_metrics

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 220, 64, 24, 12
Points = Sequence[tuple[float, float]]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 2rem auto; padding: 0 1rem; color: #222 }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem }
svg { width: 100%; height: auto; background: #fafafa; border: 1px solid #ddd } h2 { font-size: 1rem; margin: .5rem 0 }
.curve { fill: none; stroke: #1f6feb; stroke-width: 1.5 } .held { stroke: #d1480f; fill: #d1480f }
.tick { stroke: #ddd } text { font-size: 11px; fill: #555 } td, th { padding: .1rem 1rem .1rem 0; text-align: left }
pre { white-space: pre-wrap; background: #fafafa; padding: 1rem; border: 1px solid #ddd }
"""


def write_report(folder: Path) -> None:
    """Write `folder`/report.html from its metrics.jsonl, samples.jsonl and manifest.json."""
    lines = read_metrics(folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    held_out = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    skipped = sum("skipped" in line for line in lines)
    facts = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    charts = [chart("loss (nats per supervised token); evaluation in orange", _points(steps, "loss"), held_out),
              chart("gradient norm before clipping", _points(steps, "grad_norm")),
              chart("learning rate", _points(steps, "lr")),
              chart("tokens per second", _points(steps, "tokens_per_second"))]
    name = html.escape(facts["config"]["run"]["name"])
    page = (f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title><style>{STYLE}</style>"
            f"<h1>{name}</h1>{_table(facts, steps, held_out, skipped)}<main>{''.join(charts)}</main>"
            f"{_samples(read_metrics(folder / 'samples.jsonl'))}")
    (folder / "report.html").write_text(page, encoding="utf-8")


def _points(lines: list[dict[str, Any]], key: str) -> Points:
    return [(line["step"], line[key]) for line in lines]


def chart(title: str, curve: Points, held_out: Points = ()) -> str:
    """An SVG line chart of (x, y) points, with a second series as dots."""
    both = [*curve, *held_out]
    if not both:
        return ""
    (x0, x1), (y0, y1) = ((min(axis), max(axis)) for axis in zip(*both, strict=True))
    span_x, span_y = (x1 - x0) or 1, (y1 - y0) or abs(y1) or 1

    def at(x: float, y: float) -> str:
        right, up = (x - x0) / span_x, (y - y0) / span_y
        return f"{LEFT + right * (WIDTH - LEFT - 10):.1f},{TOP + (1 - up) * (HEIGHT - TOP - BOTTOM):.1f}"

    ticks = "".join(
        f"<line class=tick x1={LEFT} x2={WIDTH - 10} y1={at(x0, y).split(',')[1]} y2={at(x0, y).split(',')[1]} />"
        f"<text x={LEFT - 6} y={at(x0, y).split(',')[1]} text-anchor=end dy=4>{y:.4g}</text>"
        for y in (y0, y0 + span_y / 2, y0 + span_y))
    dots = "".join("<circle class=held r=3.5 cx={} cy={} />".format(*at(x, y).split(",")) for x, y in held_out)
    return (f"<section><h2>{html.escape(title)}</h2><svg viewBox='0 0 {WIDTH} {HEIGHT}'>{ticks}"
            f"<polyline class=curve points='{' '.join(at(x, y) for x, y in curve)}' />{dots}"
            f"<text x={LEFT} y={HEIGHT - 6}>step {x0:g}</text>"
            f"<text x={WIDTH - 10} y={HEIGHT - 6} text-anchor=end>step {x1:g}</text></svg></section>")


def _table(facts: dict[str, Any], steps: list[dict[str, Any]], held_out: Points, skipped: int) -> str:
    identity, git, counts = facts["identity"], facts["git"], facts["data"]["train"]
    rows = {"strategy": f"{identity['strategy']}, offload {identity['offload']}, {identity['world_size']} ranks",
            "data": "streamed" if counts is None else f"{counts['examples']:,} examples, {counts['tokens']:,} tokens",
            "steps": f"{len(steps):,}",
            "packing efficiency": f"{packing_efficiency(steps):.1%} of the computed tokens are real ones",
            "code": f"{git['sha'][:12]}{' (modified)' * git['dirty']}" if git else "unknown"}
    if skipped:
        rows["steps left out"] = f"{skipped:,} (guard.jsonl says which and why)"
    if held_out:
        rows["evaluation loss"] = f"{held_out[0][1]:.4f} to {held_out[-1][1]:.4f}"
    cells = "".join(f"<tr><th>{key}<td>{html.escape(str(value))}" for key, value in rows.items())
    return f"<table>{cells}</table>"


def packing_efficiency(lines: list[dict[str, Any]]) -> float:
    """Real tokens / computed tokens over all training lines of metrics.jsonl, 0 to 1."""
    steps = [line for line in lines if "padded_tokens" in line]
    computed = sum(int(line["padded_tokens"]) for line in steps)
    return sum(int(line["tokens"]) for line in steps) / max(1, computed)


def _samples(samples: list[dict[str, Any]]) -> str:
    return "".join(f"<h2>reply at step {sample['step']}</h2><pre>{html.escape(sample['prompt'][-600:])}"
                   f"<b>{html.escape(sample['reply'])}</b></pre>" for sample in samples)
