"""The tokens of one example as text that is safe to print, each with its part of the text.

Nothing of the data reaches the reader raw: what does not print, or would pass for one of the marks used here, is
shown as ⟨U+001B⟩, and a byte that is no text as ⟨f0⟩. So every mark means one thing, and data cannot drive the
terminal.
"""

from __future__ import annotations

import os
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from shardwise.data.rows import Encoded

PART = "⋯"
"""Stands for bytes of a character that a later token completes."""
_WHITE = {" ": "·", "\n": "⏎\n", "\t": "⇥", "\r": "␍"}
_MARKS = "·⏎⇥␍⋯⟨⟩⟦⟧⟪⟫▏◌"
"""Ours alone, those that view.py adds among them."""
# Characters that Unicode calls printable and no font shows.
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
_VISIBLE_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN_BYTES = sorted(set(range(256)) - set(_VISIBLE_BYTES))
# The alphabet in which byte-level BPE spells its tokens.
_ALPHABET = {chr(b): b for b in _VISIBLE_BYTES} | {chr(256 + n): b for n, b in enumerate(_HIDDEN_BYTES)}


class Piece(NamedTuple):
    """One token of an example."""

    text: str
    """Its part of the text as shown; a line break follows each ⏎."""
    id: int
    weight: float
    """Loss weight of predicting it; 0 = not learnt."""
    special: bool
    example: int = 0
    """Which of the packed examples it belongs to, from 0."""


def pieces(tokenizer: Any, encoded: Encoded, example: int = 0) -> list[Piece]:
    """The tokens of one example; a packed row is the pieces of its examples, one after the other."""
    ids = [int(i) for i in encoded.ids]
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    names = [name or "" for name in tokenizer.convert_ids_to_tokens(ids)]
    return [Piece((visible(name) if i in special else text) or "⟨⟩", i, float(weight), i in special, example)
            for i, name, text, weight in zip(ids, names, _texts(tokenizer, ids, names), encoded.weights, strict=True)]


def visible(text: str, white: bool = True) -> str:
    """`text` with everything that does not print spelt out; spaces stay spaces where `white` is False."""
    shown = "".join(" " if char == " " and not white else _shown(char) for char in text)
    return f"◌{shown}" if shown and unicodedata.category(shown[0]).startswith("M") else shown


def _shown(char: str) -> str:
    if char in _WHITE:
        return _WHITE[char]
    if "\udc80" <= char <= "\udcff":  # a byte that is not UTF-8, as `surrogateescape` keeps it
        return f"⟨{ord(char) - 0xDC00:02x}⟩"
    return char if char.isprintable() and char not in _MARKS and not _BLANK.match(char) else f"⟨U+{ord(char):04X}⟩"


def _texts(tokenizer: Any, ids: list[int], names: list[str]) -> list[str]:
    """Each token's own part of the text, from its bytes where they are known to make up the decoded text."""
    def decode(some: list[int]) -> str:
        text: str = tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    whole = _without_runs(decode(ids))
    for spelt in (_byte_level, _sentencepiece):
        chunks = [spelt(name) for name in names]
        text = _without_runs(b"".join(chunks).decode("utf-8", "replace"))
        if text == whole:
            return _split(chunks)
        if text == f" {whole}":  # the space that sentencepiece puts before a text, and takes away again
            return _split([chunks[0][1:], *chunks[1:]])
    return _by_decoding(ids, decode)


def _without_runs(text: str) -> str:
    """Decoders differ in how many replacement characters they print for one broken character."""
    return re.sub("\ufffd+", "\ufffd", text)


def _byte_level(name: str) -> bytes:
    return bytes(_ALPHABET[char] for char in name) if all(char in _ALPHABET for char in name) else name.encode()


def _sentencepiece(name: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
    return bytes.fromhex(byte[1]) if byte else name.replace("▁", " ").encode()


def _split(chunks: list[bytes]) -> list[str]:
    """Each character goes to the token that holds its last byte."""
    text = b"".join(chunks).decode("utf-8", "surrogateescape")
    ends = [0, *accumulate(len(char.encode("utf-8", "surrogateescape")) for char in text)]
    texts, done = [], 0
    for stop in accumulate(map(len, chunks)):
        whole = bisect_right(ends, stop) - 1
        texts.append(visible(text[done:whole]) + PART * (ends[whole] < stop))
        done = whole
    return texts


def _by_decoding(ids: list[int], decode: Callable[[list[int]], str]) -> list[str]:
    """What each token adds to the text decoded so far, for a tokenizer that spells its tokens in its own way."""
    texts, start, settled = [], 0, 0
    for stop in range(1, len(ids) + 1):
        before, now = decode(ids[start:settled]), decode(ids[start:stop])
        if now.endswith("\ufffd") and stop < len(ids):
            texts.append(PART)
            continue
        texts.append(visible(now[len(os.path.commonprefix([before, now])):]))
        start, settled = settled, stop  # one settled stretch of context tells whether a space precedes the next
    return texts
