"""The view of an example: nothing of the data raw, and the same said with and without colour."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from shardwise.data.look import view
from shardwise.data.look.view import Piece, html, pieces, terminal
from shardwise.data.rows import Encoded

TINY: Any = AutoTokenizer.from_pretrained(Path(__file__).parents[4] / "recipes" / "tiny" / "tokenizer")


def plain(*tokens: tuple[str, float], special: str = "") -> list[Piece]:
    return [Piece(text, n, weight, text == special) for n, (text, weight) in enumerate(tokens)]


def of(text: str) -> list[Piece]:
    ids = TINY(text)["input_ids"]
    return pieces(TINY, Encoded(np.array(ids, np.int32), np.zeros(len(ids), np.float32)))


# --- terminal -----------------------------------------------------------------------------------------------

TALK = plain(("<s>", 0), ("Ask", 0), ("·me", 0), ("⏎\n", 0), ("No", 1), (",", 1), ("·go", 1), ("⏎\n", 1), special="<s>")
PAGE = """recipe: a b⟨U+001B⟩

⟦supervised⟧  context  ⟪special⟫  ▏ next token, unless it starts with ·
· space  ⏎ new line  ⇥ tab  ⋯ part of a character  ⟨…⟩ does not print

⟪<s>⟫Ask·me▏⏎
⟦No▏,·go▏⏎⟧

8 tokens, 4 supervised (50.0%), 1 example"""


def shown(tokens: list[Piece], *, width: int = 80) -> str:
    """The example alone, without colour."""
    return "\n".join(terminal(tokens, [], colour=False, width=width).split("\n")[4:-2])


def test_without_colour_brackets_tell_what_is_learnt() -> None:
    assert terminal(TALK, ["recipe: a b\x1b"], colour=False, width=80) == PAGE


def test_weights_other_than_0_and_1_are_told() -> None:
    tokens = plain(("a", 0), ("b", 0.5), ("c", 0.5), ("d", 1), ("e", float(np.float32(0.1))))
    assert shown(tokens) == "a⟦×0.5 b▏c⟧⟦d⟧⟦×0.1 e⟧"
    assert "<sup>×0.5 </sup>" in html(tokens, "t", [])


def test_every_boundary_can_be_told_without_colour() -> None:
    assert shown(plain(("a", 0), ("·b", 0))) == "a·b"
    assert shown(plain(("a·b", 0))) == "a b"
    assert shown(plain(("a·", 0), ("·b", 0), ("··c", 0))) == "a·▏·b··c"
    assert shown(plain(("a⏎\n", 0), ("··", 0), ("b⏎\n⏎\n", 0), ("c", 0))) == "a⏎\n▏··▏b⏎\n⏎\n▏c"


def test_packed_examples_are_told_apart() -> None:
    tokens = [piece._replace(example=n) for n in range(2) for piece in plain(("a", 1))]
    assert shown(tokens) == "── example 1 ──\n⟦a⟧\n\n── example 2 ──\n⟦a⟧"
    assert terminal(tokens, [], colour=False, width=80).endswith("2 tokens, 2 supervised (100.0%), 2 examples")
    assert "<h2>Example 2</h2>" in html(tokens, "t", [])


def test_lines_break_before_words_and_count_cells() -> None:
    assert shown(plain(("one", 0), ("·tw", 0), ("o", 0)), width=7) == "one\n·tw▏o"
    assert shown(plain(("日本", 0), ("日本", 0)), width=8) == "日本\n▏日本"
    assert shown(plain(("日本", 0), ("日本", 0)), width=9) == "日本▏日本"


def test_colour_sets_off_every_token_and_ends_before_the_line() -> None:
    text = terminal(TALK, [], colour=True, width=80).split("\n")[4:6]
    grey, green = [[f"\x1b[{shade};38;5;231m" for shade in shades] for shades in (view.GREY, view.GREEN)]
    assert text == [f"\x1b[{view.GREY[0]};1;38;5;229m<s>\x1b[0m{grey[1]}Ask\x1b[0m{grey[0]}·me\x1b[0m{grey[1]}⏎\x1b[0m",
                    f"{green[0]}No\x1b[0m{green[1]},\x1b[0m{green[0]}·go\x1b[0m{green[1]}⏎\x1b[0m"]


def test_nothing_of_the_data_drives_the_terminal() -> None:
    text = terminal(of("\x1b[2J\x9b\r\b\x07\u202e"), ["\x1b]0;x\x07"], colour=False, width=80)
    assert all(char.isprintable() or char == "\n" for char in text)


# --- page ---------------------------------------------------------------------------------------------------

def test_data_stays_text_on_the_page() -> None:
    attack = "<script>alert(\"1\")</script></style><img src=x onerror='y'>"
    page = html(of(attack), attack, [f"{attack}: {attack}"])
    assert not re.search("<script|<img|onerror='", page)
    assert page.count("</style>") == 1
    text = re.sub("<wbr>|</?(span|i|mark)[^>]*>", "", page.split('<p class="tokens">')[1].split("</p>")[0])
    assert text == ("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&lt;/style&gt;&lt;img·src=x·onerror=&#x27;y"
                    "&#x27;&gt;")


def test_the_page_says_what_each_token_is() -> None:
    page = html(TALK, "t", ["row: x.jsonl:3"])
    assert "<dt>row</dt><dd>x.jsonl:3</dd>" in page
    assert ('<mark><span class="t" title="position 4&#10;id 4&#10;token No&#10;weight 1">No</span>') in page
    assert '<span class="t x" title="position 0&#10;id 0&#10;token &lt;s&gt;&#10;weight 0">&lt;s&gt;</span>' in page
    assert "<tr><td>6<td>6<td><code>·go</code><td>1\n" in page
    assert "8 tokens, 4 supervised (50.0%), 1 example" in page


def test_the_page_loads_nothing() -> None:
    assert not re.search(r"https?:|url\(|@import|src=|href=", html(TALK, "t", []))


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_stands_out_from_every_background(scheme: int) -> None:
    colours = [dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(":root {([^}]*)}", view.STYLE)]
    ours = colours[scheme]
    pairs = [("ink", ground) for ground in ("page", "odd", "even", "learnt-odd", "learnt-even")]
    pairs += [("faint", ground) for ground in ("page", "odd", "even")]
    pairs += [("learnt-faint", ground) for ground in ("learnt-odd", "learnt-even")]
    assert {pair: ratio for pair in pairs if (ratio := contrast(ours[pair[0]], ours[pair[1]])) < 4.5} == {}


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[n:n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
