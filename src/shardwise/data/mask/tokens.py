"""Text -> ids with offsets, cut where a token must not reach across, and ordinary where it only looks like control."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

LONGEST_KEPT = 256
"""Characters of a stretch whose ids are kept: most are short and the same in every chat."""
Offsets = list[tuple[int, int]]
ANCHOR = "\uf5a2"
"""Stands before a piece, so that it is not taken for the start of a text, and is removed again. Where the piece has
this character itself, as many of them as stand nowhere in it."""


class Tokens(NamedTuple):
    """ids and the [start, end) characters of each."""

    ids: list[int]
    offsets: Offsets


class TextTokenizer:
    """The tokenizer's fast backend, without padding, truncation or anything added."""

    def __init__(self, tokenizer: Any, control: Sequence[str]) -> None:
        self.whole = tokenizer.backend_tokenizer
        self.whole.no_padding()
        self.whole.no_truncation()
        self.control = list(control)
        ids = (self.whole.token_to_id(token) for token in control)
        self.control_ids = frozenset(i for i in ids if i is not None)
        self._backend = lru_cache(maxsize=4)(self._make_backend)
        self._kept_ids_of = lru_cache(maxsize=8192)(self._encode_alone)

    def _encode_alone(self, text: str) -> tuple[int, ...]:
        return tuple(self.whole.encode(text, add_special_tokens=False).ids)

    def _ids_of(self, text: str) -> tuple[int, ...]:
        return self._kept_ids_of(text) if len(text) < LONGEST_KEPT else self._encode_alone(text)

    def encode(self, texts: list[str]) -> list[Tokens]:
        """Whole texts, nothing added."""
        return [Tokens(e.ids, e.offsets) for e in self.whole.encode_batch(texts, add_special_tokens=False)]

    def cut(self, tokens: Tokens, text: str, starts: Sequence[int], *, ordinary: Sequence[tuple[int, int]] = (),
            real: str | None = None) -> Tokens:
        """The tokens, with every start in `starts` at the start of a token as it is when the model is asked.

        At inference the prompt ends there, so its ids are those of the text up to there. Where a token of the
        whole text reaches across, or the text before would be cut up otherwise, the stretch between two
        control tokens is tokenised in two. `ordinary` are [start, end) in which no control token may be
        found; `real` is the text to read there (as long as `text`).
        """
        again = [start for start in starts if not self._clean(text, tokens, start)]
        if not again and not ordinary:
            return tokens
        ids: list[int] = []
        offsets: Offsets = []
        for first, stop in self._stretches(tokens):
            low, high = tokens.offsets[first][0], tokens.offsets[stop - 1][1]
            plain = any(a < high and b > low for a, b in ordinary)
            # What `again` says of a stretch with `ordinary` text was found without reading that text.
            cuts = [start for start in (starts if plain else again) if low < start < high]
            if tokens.ids[first] in self.control_ids or not (cuts or plain):
                ids += tokens.ids[first:stop]
                offsets += tokens.offsets[first:stop]
                continue
            source = real if plain and real is not None else text
            for a, b in zip([low, *cuts], [*cuts, high], strict=True):
                piece = self._piece(source[a:b], plain)
                ids += piece.ids
                offsets += [(x + a, y + a) for x, y in piece.offsets]
        return Tokens(ids, offsets)

    def _stretches(self, tokens: Tokens) -> Iterator[tuple[int, int]]:
        """[first, stop) of control tokens one by one and of what lies between them."""
        first = 0
        for index, token in enumerate(tokens.ids):
            if token in self.control_ids:
                if index > first:
                    yield first, index
                yield index, index + 1
                first = index + 1
        if len(tokens.ids) > first:
            yield first, len(tokens.ids)

    def _piece(self, text: str, plain: bool) -> Tokens:
        longest = max(map(len, re.findall(f"{ANCHOR}+", text)), default=0)
        anchor = ANCHOR * (1 << longest.bit_length())  # powers of two, so that few are ever made
        backend, renumbered = self._backend(anchor, plain)
        encoded = backend.encode(anchor + text, add_special_tokens=False)
        before = len(anchor)
        return Tokens([renumbered.get(i, i) for i in encoded.ids[1:]],
                      [(a - before, b - before) for a, b in encoded.offsets[1:]])

    def _make_backend(self, anchor: str, plain: bool) -> tuple[Any, dict[int, int]]:
        """One that knows the anchor, with {id it gives: the real one} where they differ.

        If `plain` it knows no control token, so that none can be found in a text.
        """
        from tokenizers import AddedToken, Tokenizer

        source = self.whole.to_str()
        if plain:
            parts = json.loads(source)
            parts["added_tokens"] = [t for t in parts["added_tokens"] if t["content"] not in self.control]
            source = json.dumps(parts)
        backend = Tokenizer.from_str(source)
        backend.no_padding()
        backend.no_truncation()
        # Added tokens that are not in the model's own vocabulary are numbered one after the other, so that those
        # behind one that was taken out move up.
        renumbered = {i: self.whole.token_to_id(token.content)
                      for i, token in backend.get_added_tokens_decoder().items()}
        backend.add_special_tokens([AddedToken(anchor, special=True, normalized=False)])
        return backend, {i: real for i, real in renumbered.items() if i != real}

    def _clean(self, text: str, tokens: Tokens, start: int) -> bool:
        ids, offsets = tokens
        first = bisect_right(offsets, start, key=lambda pair: pair[1])
        if first < len(ids) and offsets[first][0] < start:
            if ids[first] not in self.control_ids:
                return False
            first += 1  # a control token that takes in the white space after it
        control = first - 1
        while control > 0 and ids[control] not in self.control_ids:
            control -= 1  # control tokens cut the text, so only the stretch since the last one can change
        if control < 0:
            return start == 0
        return self._ids_of(text[offsets[control][0]:start]) == tuple(ids[control:first])

    def span(self, tokens: Tokens, start: int, end: int) -> tuple[int, int]:
        """[first, stop) of the tokens that lie within the characters [start, end), or begin there."""
        first = bisect_right(tokens.offsets, start, key=lambda pair: pair[1])
        if first < len(tokens.ids) and tokens.offsets[first][0] < start and tokens.ids[first] in self.control_ids:
            first += 1  # the header's own, which takes in the white space after it
        return first, bisect_left(tokens.offsets, end, key=lambda pair: pair[0])
