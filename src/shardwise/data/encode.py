"""Text -> token ids and which of them are supervised, checked against the tokenizer, never assumed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from shardwise.data.chat import Rendered, render_chat
from shardwise.data.sources import RawRow, messages_of
from shardwise.errors import DataError

Offsets = list[tuple[int, int]]
Tokens = tuple[list[int], Offsets]


class Encoded(NamedTuple):
    """One example: token ids, and 1 where a token is to be predicted (0 elsewhere), of equal length."""

    ids: list[int]
    supervised: list[int]


class ChatEncoder:
    """Rows of `messages` -> Encoded, through one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, *, template: str | None, supervise: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.supervise = supervise
        self.special = frozenset(tokenizer.all_special_ids)
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.markers = sorted(added | set(tokenizer.all_special_tokens))
        self._segment_ids = lru_cache(maxsize=4096)(lambda text: tuple(self._tokens([text])[0][0]))

    def __call__(self, rows: Sequence[RawRow]) -> list[Encoded]:
        """Encode rows. Raises DataError naming the row and turn that cannot be masked with certainty."""
        rendered = [self._render(row) for row in rows]
        tokens = self._tokens([r.text for r in rendered])
        return [self._masked(row, r, *self._as_generated(row, r, *t))
                for row, r, t in zip(rows, rendered, tokens, strict=True)]

    def _render(self, row: RawRow) -> Rendered:
        messages = messages_of(row)
        for turn, message in enumerate(messages):
            marker = next((m for m in self.markers if m in message["content"]), None)
            if marker is not None:
                raise DataError(f"{row.place}: turn {turn} contains the control token {marker!r} as text; "
                                "remove it, or it would end or begin a turn")
        return render_chat(messages, self._apply, supervise=self.supervise, place=row.place)

    def _apply(self, messages: Sequence[dict[str, Any]], generation: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=generation)
        return text

    def _tokens(self, texts: list[str]) -> list[Tokens]:
        batch = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True,
                               return_attention_mask=False)
        return list(zip(batch["input_ids"], batch["offset_mapping"], strict=True))

    def _as_generated(self, row: RawRow, rendered: Rendered, ids: list[int], offsets: Offsets) -> Tokens:
        """The ids before every answer must be exactly those of the generation prompt, as at inference.

        Where a token of the whole text would join the prompt and the answer, the text is cut there first.
        """
        text, starts = rendered.text, [start for start, _ in rendered.spans]
        if all(self._clean_border(text, ids, offsets, start) for start in starts):
            return ids, offsets
        if ids[0] not in self.special:
            raise DataError(f"{row.place}: a token joins the generation prompt and the answer, and without a control "
                            "token at the start of the chat the tokenizer cannot be made to cut there; "
                            "use a chat template with control tokens")
        # A piece is tokenised behind a control token, so that it is not taken for the start of a text.
        anchor = text[offsets[0][0]:offsets[0][1]]
        cuts = [0, *starts, len(text)]
        pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        first, *rest = self._tokens([pieces[0], *(anchor + piece for piece in pieces[1:])])
        ids, offsets = list(first[0]), list(first[1])
        for cut, (piece_ids, piece_offsets) in zip(starts, rest, strict=True):
            ids += piece_ids[1:]
            offsets += [(a - len(anchor) + cut, b - len(anchor) + cut) for a, b in piece_offsets[1:]]
        return ids, offsets

    def _clean_border(self, text: str, ids: list[int], offsets: Offsets, start: int) -> bool:
        first = bisect_right(offsets, start, key=lambda pair: pair[1])
        if first < len(ids) and offsets[first][0] < start:
            return False
        special = first - 1
        while special > 0 and ids[special] not in self.special:
            special -= 1  # control tokens cut the text, so only the stretch since the last one can change
        return self._segment_ids(text[offsets[special][0]:start]) == tuple(ids[special:first])

    def _masked(self, row: RawRow, rendered: Rendered, ids: list[int], offsets: Offsets) -> Encoded:
        supervised = [0] * len(ids)
        for start, end in rendered.spans:
            first = bisect_right(offsets, start, key=lambda pair: pair[1])
            stop = bisect_left(offsets, end, key=lambda pair: pair[0])
            if stop > first and offsets[stop - 1][1] > end:
                raise DataError(f"{row.place}: a token reaches over the end of an answer at character {end}; "
                                "the template needs a control token there")
            stop = self._without_trailing_space(ids, first, stop, rendered.text, offsets)
            if stop <= first:
                raise DataError(f"{row.place}: an assistant turn at character {start} renders to no token")
            supervised[first:stop] = [1] * (stop - first)
        return Encoded(ids, supervised)

    def _without_trailing_space(self, ids: list[int], first: int, stop: int, text: str, offsets: Offsets) -> int:
        """A turn ends with its control token; white space the template prints after it is not the model's."""
        last = stop - 1
        while last >= first and not text[offsets[last][0]:offsets[last][1]].strip():
            last -= 1
        return last + 1 if last >= first and ids[last] in self.special else stop


def text_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Documents -> ids as the tokenizer adds them (BOS once where it has one), ended by EOS once."""
    batch = tokenizer(list(texts), return_attention_mask=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos] for ids in batch]
