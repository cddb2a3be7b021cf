"""What one example looks like to the model: its tokens and which of them are learnt, for a terminal or as a page."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from shardwise.data.look.pieces import Piece, pieces, visible

__all__ = ["Piece", "html", "pieces", "terminal"]

MARKS = {"·": "space", "⏎": "new line", "⇥": "tab", "⋯": "part of a character", "⟨…⟩": "does not print"}
GREY, GREEN = ("48;5;236", "48;5;239"), ("48;5;22", "48;5;28")
"""Two shades each, taken in turn, so that every token ends where the shade changes."""
STYLE = """
:root { --page: #fff; --ink: #1f2328; --faint: #57606a; --line: #d0d7de; --odd: #f6f8fa; --even: #e9edf1;
  --learnt-odd: #d3f5da; --learnt-even: #b9ebc4; --learnt-line: #1a7f37; --learnt-faint: #44564a }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --faint: #9ba4ae; --line: #3d444d;
  --odd: #161b22; --even: #232a33; --learnt-odd: #0f3d20; --learnt-even: #18512d; --learnt-line: #3fb950;
  --learnt-faint: #b4c9ba } }
body { margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 1.25rem } h2 { font-size: 1rem; margin: 2rem 0 .5rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; margin: 0 } dd { margin: 0 }
dt, .key, th { color: var(--faint) } .sum { font-weight: 600; margin: 1.25rem 0 .75rem }
.key { display: flex; flex-wrap: wrap; align-items: baseline; gap: .4rem 1.25rem;
  font-size: .875rem; margin: 0 0 1.5rem }
code, .tokens, .key mark, .key b { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
.tokens { white-space: pre-wrap; font-size: .9375rem; line-height: 2; margin: 0; padding: 1rem 1.25rem;
  border: 1px solid var(--line); border-radius: .5rem }
mark, .key b { color: var(--ink); font-weight: 400 } mark { background: none }
i { font-style: normal; color: var(--faint) }
.t { background: var(--odd); padding: .2em 0; unicode-bidi: isolate }
.t:nth-of-type(even) { background: var(--even) }
mark .t { background: var(--learnt-odd); border-bottom: 2px solid var(--learnt-line) }
mark .t:nth-of-type(even) { background: var(--learnt-even) } mark i { color: var(--learnt-faint) }
.x { border: 1px solid var(--faint); border-radius: .375rem; padding: .1em .35em; margin: 0 .15em; font-size: .8em }
mark .x { border: 1px solid var(--learnt-line); border-bottom-width: 2px } sup { font-weight: 700; line-height: 1 }
details { margin-top: 2rem } summary { cursor: pointer; font-weight: 600; padding: .5rem 0 }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
td, th { padding: .2rem 1.25rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
"""


class Shown(NamedTuple):
    """A token on a terminal."""

    text: str
    style: str
    """Parameters of the escape sequence that sets it off; empty without colour."""
    word: bool
    """Whether a word starts here, the better place to break a line."""


def terminal(pieces: Sequence[Piece], header: Sequence[str], *, colour: bool, width: int) -> str:
    """The example in lines of at most `width` cells, with colours or, without, with brackets."""
    legend = [Piece("supervised", 0, 1.0, False), Piece("context", 0, 0.0, False), Piece("special", 0, 0.0, True)]
    key = "  ".join(_painted(shown.text, shown.style) for one in legend for shown in _shown([one], colour))
    marks = "  ".join(f"{mark} {meaning}" for mark, meaning in MARKS.items())
    key += "" if colour else "  ▏ next token, unless it starts with ·"
    blocks = [*(visible(line, white=False) for line in header), "", key, marks]
    for number, tokens in _examples(pieces):
        blocks += ["", *([f"── example {number} ──"] if number else []), *_lines(list(_shown(tokens, colour)), width)]
    return "\n".join([*blocks, "", summary(pieces)])


def summary(pieces: Sequence[Piece]) -> str:
    """How many tokens there are and how many of them are learnt."""
    learnt, examples = sum(piece.weight > 0 for piece in pieces), len({piece.example for piece in pieces})
    return (f"{len(pieces):,} token{'s' * (len(pieces) != 1)}, {learnt:,} supervised "
            f"({learnt / max(len(pieces), 1):.1%}), {examples} example{'s' * (examples != 1)}")


def _examples(pieces: Sequence[Piece]) -> list[tuple[int, list[Piece]]]:
    """The packed examples with their numbers from 1; a lone one has the number 0."""
    parts = [list(part) for _, part in groupby(pieces, key=lambda piece: piece.example)]
    return [(number * (len(parts) > 1), part) for number, part in enumerate(parts, 1)]


def _factor(weight: float) -> str:
    """What a run starts with where its weight is out of the ordinary; a real space never comes from the data."""
    return "" if weight in (0, 1) else f"×{weight:g} "


def _shown(pieces: Sequence[Piece], colour: bool) -> Iterator[Shown]:
    shade, new_line = 0, True
    for weight, group in groupby(pieces, key=lambda piece: piece.weight):
        run = list(group)
        for n, piece in enumerate(run):
            text = piece.text if colour else _bracketed(run, n)
            style = ";".join([(GREEN if weight else GREY)[shade], "1;38;5;229" if piece.special else "38;5;231"])
            word = new_line or piece.special or piece.text.startswith("·")
            yield Shown((_factor(weight) if colour and not n else "") + text, style if colour else "", word)
            shade, new_line = 1 - shade, piece.text.endswith("\n")


def _bracketed(run: list[Piece], n: int) -> str:
    """Token `n` of a run of one weight, with what tells it from its neighbours without colour."""
    piece, before = run[n], run[n - 1] if n else None
    # A space inside a token is a real one, so that a · after text always begins a token and needs no ▏.
    text = re.sub("(?<=[^·\n])·+(?=[^·])", lambda found: " " * len(found[0]), piece.text)
    text = f"⟪{text}⟫" if piece.special else text
    if piece.weight and n == 0:
        text = f"⟦{_factor(piece.weight)}{text}"
    if before and not (piece.special or before.special or (text[0] == "·" and before.text[-1] not in "·\n")):
        text = f"▏{text}"
    if piece.weight and n == len(run) - 1:
        text = f"{text[:-1]}⟧\n" if text.endswith("\n") else f"{text}⟧"
    return text


def _cells(text: str) -> int:
    return sum(0 if unicodedata.category(char) in ("Mn", "Me", "Cc") else
               2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _lines(tokens: list[Shown], width: int) -> list[str]:
    """Broken before a word where one does not fit, inside a word only where it is longer than a line."""
    lines, used = [""], 0
    for n, token in enumerate(tokens):
        until = next((m for m in range(n + 1, len(tokens)) if tokens[m].word), len(tokens)) if token.word else n + 1
        needed = sum(_cells(part.text) for part in tokens[n:until])
        if used and used + (needed if needed <= width else _cells(token.text)) > width:
            lines, used = [*lines, ""], 0
        for m, part in enumerate(token.text.split("\n")):
            if m:
                lines, used = [*lines, ""], 0
            lines[-1] += _painted(part, token.style)
            used += _cells(part)
    return lines if lines[-1] else lines[:-1]


def _painted(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if text and style else text


def html(pieces: Sequence[Piece], title: str, header: Sequence[str]) -> str:
    """A page that needs nothing else; a header line `name: value` becomes a row of facts."""
    facts = "".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>"
                    for name, _, value in (line.partition(": ") for line in header))
    marks = "".join(f"<span><code>{mark}</code> {meaning}</span>" for mark, meaning in MARKS.items())
    body, start = "", 0
    for number, tokens in _examples(pieces):
        body += (f"<h2>Example {number}</h2>" if number else "") + f'<p class="tokens">{_runs(tokens, start)}</p>\n'
        start += len(tokens)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_safe(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        # The browser is told to load and run nothing, should an escape ever be forgotten.
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">\n"""
        f"<style>{STYLE}</style></head>\n<body><main><h1>{_safe(title)}</h1>\n<dl>{facts}</dl>\n"
        f'<p class="sum">{summary(pieces)}</p>\n<p class="key"><mark><span class="t">supervised</span></mark>'
        f'<b class="t">context</b><b class="t x">special</b>{marks}</p>\n{body}{_table(pieces)}</main></body></html>\n')


def _safe(text: str) -> str:
    return escape(visible(text, white=False))


def _runs(pieces: Sequence[Piece], start: int) -> str:
    """The tokens, those of a weighted run inside one <mark>; a line may break where a word starts."""
    out, position = "", start
    for weight, group in groupby(pieces, key=lambda piece: piece.weight):
        factor = _factor(weight)
        out += ("<mark>" if weight else "") + (f"<sup>{factor}</sup>" if factor else "")
        for piece in group:
            out += "<wbr>" * (piece.special or piece.text.startswith("·")) + _token(piece, position)
            position += 1
        out += "</mark>" if weight else ""
    return out


def _token(piece: Piece, position: int) -> str:
    tip = f"position {position}&#10;id {piece.id}&#10;token {escape(_flat(piece))}&#10;weight {piece.weight:g}"
    # Every mark is ours: the same character in the data is spelt out.
    text = re.sub("[·⏎⇥␍⋯◌]|⟨[^⟩]*⟩", r"<i>\g<0></i>", escape(piece.text))
    return f'<span class="t{" x" * piece.special}" title="{tip}">{text}</span>'


def _flat(piece: Piece) -> str:
    return piece.text.replace("\n", "")


def _table(pieces: Sequence[Piece]) -> str:
    rows = "".join(f"<tr><td>{n}<td>{piece.id}<td><code>{escape(_flat(piece))}</code><td>{piece.weight:g}\n"
                   for n, piece in enumerate(pieces))
    return ('<details><summary>One token a line</summary><table><tr><th scope="col">position<th scope="col">id'
            f'<th scope="col">token<th scope="col">weight\n{rows}</table></details>')
