"""Chats and texts -> token ids and loss weights, checked on every row, never assumed."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardwise.data.faults import RowFault
from shardwise.data.mask.chat import Rendered, Turn, find_turns, render_chat, wanted_turns
from shardwise.data.mask.disguise import Disguise, disguise
from shardwise.data.mask.exchanges import split
from shardwise.data.mask.readings import compare
from shardwise.data.mask.template import Spans, Template
from shardwise.data.mask.tokens import TextTokenizer, Tokens
from shardwise.data.rows import Chat, Encoded

Supervise = str | tuple[str, ...]
UNLIMITED = 1 << 62


class Draft(NamedTuple):
    """A chat on its way: with stand-ins for control tokens of the user's, if it has any, and as text."""

    chat: Chat
    wanted: list[int]
    rendered: Rendered
    disguise: Disguise | None
    part: bool = False
    """One of several parts of a conversation that was too long."""


class ChatEncoder:
    """Chats -> Encoded, through one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, *, template: str | None, supervise: Supervise, max_length: int = UNLIMITED,
                 on_too_long: str = "error") -> None:
        self.template = Template(tokenizer, template)
        self.tokens = TextTokenizer(tokenizer, self.template.control)
        self.supervise = supervise
        self.max_length = max_length
        self.on_too_long = on_too_long
        self.bos = tokenizer.bos_token_id if tokenizer.bos_token_id != tokenizer.eos_token_id else None

    def __call__(self, chats: Sequence[Chat]) -> list[list[Encoded] | RowFault]:
        """The examples of each chat (one, unless split for length), or why there is none.

        A fault of one chat does not touch the others.
        """
        drafts = [self._draft(chat) for chat in chats]
        tokens = iter(self.tokens.encode([draft.rendered.text for draft in drafts if isinstance(draft, Draft)]))
        return [draft if isinstance(draft, RowFault) else self._finished(draft, next(tokens)) for draft in drafts]

    def _draft(self, chat: Chat) -> Draft | RowFault:
        try:
            wanted = wanted_turns(chat, self.supervise)
            hiding = disguise(chat, self.template)
            hidden = hiding.hide(chat, self.template) if hiding else chat
            return Draft(hidden, wanted, self._rendered(hidden, hiding), hiding)
        except RowFault as fault:
            return fault

    def _rendered(self, chat: Chat, hiding: Disguise | None) -> Rendered:
        rendered = render_chat(chat, self.template)
        if hiding:
            hiding.check(chat, rendered.text, self.template)
        return rendered

    def _finished(self, draft: Draft, tokens: Tokens) -> list[Encoded] | RowFault:
        limit = self.max_length
        try:
            if len(tokens.ids) <= limit or self.on_too_long == "truncate":
                example = self._encoded(draft, tokens)
                if len(example.ids) <= limit:
                    return [example]
                if self.on_too_long == "truncate":
                    return [_truncated(example, limit)]
        except RowFault as fault:
            return fault
        if self.on_too_long == "split" and not draft.part:
            return split(draft.chat, draft.wanted, partial(self._part, draft), share=limit / len(tokens.ids))
        return RowFault("too_long", f"{len(tokens.ids):,} tokens, more than data.max_length={limit:,}")

    def _part(self, whole: Draft, chat: Chat) -> list[Encoded] | RowFault:
        try:
            wanted = [i for i, weight in enumerate(chat.weights) if weight > 0]
            if not wanted:
                raise RowFault("no_supervised", "no turn of this part carries loss")
            draft = Draft(chat, wanted, self._rendered(chat, whole.disguise), whole.disguise, part=True)
        except RowFault as fault:
            return fault
        return self._finished(draft, self.tokens.encode([draft.rendered.text])[0])

    def _encoded(self, draft: Draft, tokens: Tokens) -> Encoded:
        chat, text = draft.chat, draft.rendered.text
        turns = find_turns(text, chat, draft.wanted, self.template)
        compare(draft.rendered, turns, self.template, [message["role"] for message in chat.messages])
        notes = list(chat.notes)
        ordinary: Spans = []
        if draft.disguise:
            text, ordinary = draft.disguise.real(text), draft.disguise.places(text)
            notes.append("marker_text")
        tokens = self.tokens.cut(tokens, draft.rendered.text, [turn.start for turn in turns],
                                 ordinary=ordinary, real=text)
        if self.bos is not None and tokens.ids[:2] == [self.bos, self.bos]:
            raise RowFault("template_refused", "the chat begins with BOS twice; the template must print it once")
        weights = np.zeros(len(tokens.ids), np.float32)
        for turn in turns:
            first, stop = self._within(turn, tokens, text)
            weights[first:stop] = chat.weights[turn.number]
            if tokens.ids[stop - 1] not in self.tokens.control_ids and "terminator_untrained" not in notes:
                notes.append("terminator_untrained")
        weights[:1] = 0  # nothing precedes the first token to predict it from
        return Encoded(np.asarray(tokens.ids, np.int32), weights, tuple(notes))

    def _within(self, turn: Turn, tokens: Tokens, text: str) -> tuple[int, int]:
        first, stop = self.tokens.span(tokens, turn.start, turn.end)
        over = stop > first and tokens.offsets[stop - 1][1] > turn.end
        if over and tokens.ids[stop - 1] not in self.tokens.control_ids:  # those may take in the space after them
            raise RowFault("mask_disagreement", f"turn {turn.number}: a token reaches over the end of the answer "
                           f"({text[turn.end - 10:turn.end + 10]!r}); the template needs a control token there")
        if stop <= first:
            raise RowFault("no_supervised", f"turn {turn.number}: the answer renders to no token")
        return first, stop


def _truncated(example: Encoded, limit: int) -> Encoded:
    weights = example.weights[:limit]
    if not weights.any():
        raise RowFault("too_long", f"its first trained answer begins beyond data.max_length={limit:,}, so cutting it "
                                   "there leaves nothing to learn")
    return Encoded(example.ids[:limit], weights, (*example.notes, "truncated"))


class TextEncoder:
    """Documents -> ids as the tokenizer adds them (BOS once where it has one), ended by EOS once.

    Text equal to a special token is ordinary text. Every token carries loss; the first of a block does not, which
    is only known when blocks are cut.
    """

    def __init__(self, tokenizer: Any) -> None:
        # A copy of its own: how it treats special tokens is a state, and other threads share the tokenizer.
        self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = True
        self.eos = tokenizer.eos_token_id
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.control_pattern = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def __call__(self, texts: Sequence[str]) -> list[list[Encoded] | RowFault]:
        """One example for each document."""
        return [[Encoded(np.asarray(ids, np.int32), np.ones(len(ids), np.float32),
                         ("marker_text",) if self.control_pattern.search(text) else ())]
                for text, ids in zip(texts, self.ids(texts), strict=True)]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each document."""
        ends = [] if self.eos is None else [self.eos]
        encoded = self.backend.encode_batch(list(texts), add_special_tokens=True)
        return [e.ids if e.ids[-1:] == ends else [*e.ids, *ends] for e in encoded]
