"""Second reading of what carries loss, and the comparison: generation tags, or the marks around a turn.

Tags are the template author's own word for what the model writes. Without them the text is scanned for the
header that opens an assistant turn and the control token that ends it. Neither looks at prefixes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from shardwise.data.faults import RowFault
from shardwise.data.mask.chat import Rendered, Turn
from shardwise.data.mask.template import Spans, Template


def compare(rendered: Rendered, found: list[Turn], template: Template, roles: list[str]) -> None:
    """Raises RowFault naming the turn and both readings where they differ."""
    turns = [turn for turn in found if roles[turn.number] == "assistant"]
    if not turns:
        return
    whole = len(turns) == roles.count("assistant")
    if rendered.tags is not None:
        _check(rendered, turns, _merged(_trimmed(rendered.tags, rendered.text)), "the generation tags", whole, template)
    elif template.headers:
        _check(rendered, turns, marked(rendered.text, template), "the marks of a turn", whole, template)
    else:
        raise RowFault("mask_disagreement", "the chat template prints nothing by which an assistant turn could be told "
                       "from others, so what it supervises cannot be checked; use one that does")


def marked(text: str, template: Template) -> Spans:
    """Spans between an assistant header and the next end of a turn."""
    spans, at = [], 0
    while found := template.header_pattern.search(text, at):
        start = found.end()
        end = template.end_pattern.search(text, start)
        if end is None and template.ends:
            break
        at = end.end() if end else start + 1  # where nothing ends a turn, its start alone is compared
        spans.append((start, at))
    return spans


def _check(rendered: Rendered, turns: list[Turn], other: Spans, name: str, whole: bool, template: Template) -> None:
    text = rendered.text
    starts, ends = [span[0] for span in other], [span[1] for span in other]
    seen = 0
    for turn in turns:
        near = other[bisect_right(ends, turn.start):bisect_left(starts, turn.end)]
        seen += len(near)
        own = [(turn.start, turn.end)] if rendered.tags is not None else _without_headers(turn, text, template)
        open_ended = rendered.tags is None and not template.ends
        same = own[0][0] == starts[seen - 1] if open_ended and near else _merged(_trimmed(own, text)) == near
        if not same:
            said = " + ".join(repr(_short(text[a:b])) for a, b in near) or "nothing"
            raise RowFault("mask_disagreement", f"turn {turn.number}: two readings of what to supervise differ. By the "
                           f"template's prefixes: {_short(text[turn.start:turn.end])!r}; by {name}: {said}")
    if whole and seen != len(other):
        stray = next(span for span in other if not any(span[0] < t.end and span[1] > t.start for t in turns))
        raise RowFault("mask_disagreement", f"two readings of what to supervise differ: by {name} the text "
                       f"{_short(text[stray[0]:stray[1]])!r} is an answer too, but it is in none of the "
                       "assistant's turns")


def _without_headers(turn: Turn, text: str, template: Template) -> Spans:
    """A turn's span, cut at headers within it (some templates open several channels in one turn)."""
    spans, at = [], turn.start
    while found := template.header_pattern.search(text, at, turn.end):
        spans.append((at, found.start()))
        at = found.end()
    return [*spans, (at, turn.end)]


def _trimmed(spans: Spans, text: str) -> Spans:
    """White space behind the token that ends a turn is not the model's: nobody waits for it."""
    return [(a, a + len(text[a:b].rstrip())) if text[a:b].strip() else (a, b) for a, b in spans]


def _merged(spans: Spans) -> Spans:
    merged: Spans = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        elif a < b:
            merged.append((a, b))
    return merged


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
