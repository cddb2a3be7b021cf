"""Control tokens that somebody wrote as text, behind stand-ins while their chat is rendered and cut up.

So nothing that looks for control tokens finds one that the template did not print. A stand-in is as long as its
token and occurs nowhere else in the chat, so that the text comes back exactly, character by character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shardwise.data.faults import RowFault
from shardwise.data.mask.template import Spans, Template
from shardwise.data.rows import Chat

CANDIDATES = range(0x20000, 0x2A6E0)
"""Rare ideographs: letters that print, so that a template which shows an object as Python does escapes none."""


class Disguise:
    """One character for each control token that a chat has as text."""

    def __init__(self, tokens: set[str], taken: set[str]) -> None:
        free = (char for char in map(chr, CANDIDATES) if char not in taken)
        self.stand_ins = dict(zip(sorted(tokens), free, strict=False))
        if len(self.stand_ins) < len(tokens):
            raise RowFault("mask_disagreement", "it holds text equal to control tokens, and every character that "
                                                "could stand for them besides")
        self._tokens = {char * len(token): token for token, char in self.stand_ins.items()}
        self._runs = re.compile("|".join(self._tokens))

    def hide(self, chat: Chat, template: Template) -> Chat:
        """The chat with stand-ins for control tokens."""
        return _mapped(chat, lambda text: template.control_pattern.sub(
            lambda found: self.stand_ins[found[0]] * len(found[0]), text))

    def real(self, text: str) -> str:
        """The text with the tokens back in place, as long as before."""
        return self._runs.sub(lambda found: self._tokens[found[0]], text)

    def places(self, text: str) -> Spans:
        """[start, end) of every stand-in."""
        return [found.span() for found in self._runs.finditer(text)]

    def check(self, hidden: Chat, text: str, template: Template) -> None:
        """Raises RowFault unless the chat itself renders to what the hidden one does with the tokens put back."""
        chat = _mapped(hidden, self.real)
        if template.render(chat.messages, chat.tools) != self.real(text):
            raise RowFault("mask_disagreement", f"text equal to a control token ({', '.join(self.stand_ins)[:60]}) is "
                           "not printed as it stands: the chat template takes it apart or changes it")


def disguise(chat: Chat, template: Template) -> Disguise | None:
    """What hides the control tokens of a chat; None for one without. Raises RowFault where nothing can."""
    texts = [message["content"] for message in chat.messages if len(message) == 2]  # role and content, as a rule
    if chat.tools or len(texts) != len(chat.messages):
        texts = [text for part in (chat.messages, chat.tools) for text in _texts(part)]
    if not any(map(template.control_pattern.search, texts)):
        return None
    tokens = {token for text in texts for token in template.control_pattern.findall(text)}
    return Disguise(tokens, set().union(*texts, template.source_of(chat.tools)))


def _mapped(chat: Chat, change: Callable[[str], str]) -> Chat:
    def of(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {of(key): of(item) for key, item in value.items()}
        return [of(item) for item in value] if isinstance(value, list) else value

    return replace(chat, messages=of(chat.messages), tools=of(chat.tools))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
