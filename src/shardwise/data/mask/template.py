"""A chat template as a function, and what can be learnt about it from small conversations of our own."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from shardwise.data.faults import RowFault

Message = dict[str, Any]
Spans = list[tuple[int, int]]
"""[start, end) in characters."""
BLANK = " \t\r\n▁"
"""Some vocabularies add runs of white space as tokens, which mark nothing."""
THINKING = re.compile("think", re.IGNORECASE)
LONGEST_STRUCTURE = 1024
"""Messages of a conversation whose structure is proven: that costs a render per message, once for all
conversations of these roles."""


FUNCTION = "probe_function"
CALL = {"id": "call00001", "type": "function", "function": {"name": FUNCTION, "arguments": {"a": 1}}}


class Beginning(NamedTuple):
    """A text of which only this is kept, so that thousands of them take no memory."""

    length: int
    fingerprint: int

    def of(self, text: str) -> bool:
        """Whether the text begins with it."""
        return len(text) >= self.length and hash(text[:self.length]) == self.fingerprint


class Structure(NamedTuple):
    """How the template prints a plain conversation of given roles: pieces[0] content pieces[1] content ...

    `before[i]`: characters between the generation prompt's end and the content of assistant turn i, which
    the model has to write too (an empty think block, say); None where the generation prompt of the turns
    before it is not what stands there. `after[i]`: characters of its end after the content, terminator
    included. For other roles before is 0.
    """

    pieces: list[str]
    before: list[int | None]
    after: list[int]


class Template:
    """Renders, and knows the control tokens, the header and the ends of an assistant turn."""

    def __init__(self, tokenizer: Any, source: str | None) -> None:
        self.tokenizer = tokenizer
        self.source = source
        added = list(tokenizer.added_tokens_decoder.values())
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        # Some vocabularies hold turn markers that are not flagged special (DeepSeek's <｜User｜>), and some
        # flag think tags, which are content that the model writes.
        marks = special | self._between_turns({token.content for token in added})
        self.control = sorted((m for m in marks if not THINKING.search(m)), key=lambda token: (-len(token), token))
        self.control_pattern = re.compile("|".join(map(re.escape, self.control)) or r"(?!)")
        self.structure = lru_cache(maxsize=512)(self._structure)
        self._beginning = lru_cache(maxsize=8192)(self._render_beginning)
        ends, headers = self._learn_turn()
        self.ends = _longest_first(ends)
        """Tokens that end an assistant turn."""
        self.end_pattern = re.compile("|".join(map(re.escape, self.ends)) or r"(?!)")
        self.headers = _longest_first(headers)
        """What stands before an assistant turn."""
        self.header_pattern = re.compile("|".join(map(re.escape, self.headers)) or r"(?!)")

    def has_tags(self, tools: Any = None) -> bool:
        """Whether the template marks with {% generation %} what the model writes."""
        return _tagged(self.source_of(tools))

    def render(self, messages: Sequence[Message], tools: Any, *, generation: bool = False) -> str:
        """The conversation as text. Raises RowFault where the template refuses it."""
        return self._render(messages, tools, generation, False)[0]

    def render_tagged(self, messages: Sequence[Message], tools: Any) -> tuple[str, Spans]:
        """The text, and the character spans inside generation tags."""
        return self._render(messages, tools, False, True)

    def source_of(self, tools: Any) -> str:
        """The template itself (some tokenizers have another one for conversations with tools)."""
        source: str = self.tokenizer.get_chat_template(self.source, tools)
        return source

    def _render(self, messages: Sequence[Message], tools: Any, generation: bool, tagged: bool) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)], tools=tools, chat_template=self.source_of(tools),
                add_generation_prompt=generation, return_assistant_tokens_mask=tagged,
                **self.tokenizer.special_tokens_map)
        except Exception as error:  # a template may raise anything: jinja's errors, its own words about the data
            said = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(str(error).split())[:300])
            raise RowFault("template_refused",
                           f"the chat template refuses the first {len(messages)} turns: {said}") from None
        return texts[0], list(spans[0]) if tagged else []

    # --- what is learnt from conversations of our own -----------------------------------------------------

    def _between_turns(self, tokens: set[str]) -> set[str]:
        """Added tokens that the template prints around plain turns."""
        try:
            text = self.render(nonces(("user", "assistant", "user", "assistant")), None)
        except RowFault:
            return set()
        return {token for token in tokens if token.strip(BLANK) and token in text[:text.find(nonce(2))]}

    def _learn_turn(self) -> tuple[list[str], list[str]]:
        """The strings that end an assistant's turn, and those that stand before one."""
        ends, headers = [], []
        for roles in (("user", "assistant", "user", "assistant"), ("user", "assistant")):
            structure = self.structure(roles)
            if structure is None:
                continue
            for i in range(1, len(roles), 2):
                found = self.control_pattern.search(structure.pieces[i + 1][:structure.after[i]])
                ends += [found.group()] if found else []
            lead = structure.pieces[1]
            headers.append(self._from_last_control(lead[:len(lead) - (structure.before[1] or 0)]))
        headers = self._asked_with(nonces(("user",))) or headers[:1]
        calls = [*nonces(("user",)), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        try:
            called = self.render(calls, None)
            controls = list(self.control_pattern.finditer(called, called.rfind(FUNCTION)))
            ends += [controls[-1].group()] if FUNCTION in called and controls else []
            result = {"role": "tool", "content": nonce(2), "tool_call_id": CALL["id"], "name": "f"}
            asked = self.render([*calls, result], None, generation=True)
            if nonce(2) in asked and not asked.endswith(tuple(headers)):
                headers.append(self._from_last_control(asked[asked.rfind(nonce(2)) + len(nonce(2)):]))
        except RowFault:
            pass  # it has no tools
        return ends, [header for header in headers if header.strip()]

    def _from_last_control(self, text: str) -> str:
        found = list(self.control_pattern.finditer(text))
        return text[found[-1].start():] if found else text.lstrip()

    def _asked_with(self, messages: list[Message]) -> list[str]:
        """The generation prompt."""
        try:
            bare = self.render(messages, None)
            asked = self.render(messages, None, generation=True)
        except RowFault:
            return []
        return [asked[len(bare):].lstrip()] if asked.startswith(bare) and asked != bare else []

    def _render_beginning(self, roles: tuple[str, ...], generation: bool) -> Beginning | None:
        try:
            text = self.render(nonces(roles), None, generation=generation)
        except RowFault:
            return None
        return Beginning(len(text), hash(text))

    def _structure(self, roles: tuple[str, ...]) -> Structure | None:
        """Proven on a conversation of nonces by literal prefixes; None where it cannot be."""
        try:
            text = self.render(nonces(roles), None)
        except RowFault:
            return None
        pieces, at, starts = [], 0, []
        for i in range(len(roles)):
            found = text.find(nonce(i), at)
            if found < 0 or text.count(nonce(i)) != 1:
                return None
            pieces.append(sys.intern(text[at:found]))  # few are different
            starts.append(found)
            at = found + len(nonce(i))
        pieces.append(text[at:])
        before = [self._before(text, roles, i, starts[i]) for i in range(len(roles))]
        after = [self._after(text, roles, i, starts[i] + len(nonce(i)), pieces[i + 1]) for i in range(len(roles))]
        return Structure(pieces, before, after)

    def _before(self, text: str, roles: tuple[str, ...], turn: int, start: int) -> int | None:
        if roles[turn] != "assistant":
            return 0
        prompt = self._beginning(roles[:turn], True)
        good = prompt is not None and prompt.length <= start and prompt.of(text)
        return start - prompt.length if good and prompt is not None else None

    def _after(self, text: str, roles: tuple[str, ...], turn: int, at: int, piece: str) -> int:
        until = self._beginning(roles[:turn + 1], False) if roles[turn] == "assistant" else None
        literal = until is not None and until.of(text)
        own = piece[:until.length - at] if literal and until is not None else piece
        found = self.control_pattern.search(own)
        return found.end() if found else len(own) if literal else 0


@lru_cache(maxsize=8)  # asked for every row
def _tagged(source: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None


def _longest_first(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(dict.fromkeys(texts), key=lambda text: (-len(text), text)))


def nonce(index: int) -> str:
    """A content that no template and no conversation holds (private use characters around a number)."""
    return f"\uf5a0{index}\uf5a1"


def nonces(roles: Sequence[str]) -> list[Message]:
    """A conversation of nonces."""
    return [{"role": role, "content": nonce(i)} for i, role in enumerate(roles)]
