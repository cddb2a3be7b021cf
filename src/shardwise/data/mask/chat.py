"""Which characters of a rendered chat carry loss: first reading, by prefixes of the template's own output.

For a supervised assistant turn, the render of the turns before it with the generation prompt must be a
literal prefix of the whole render: what follows it is what the model has to write, up to and with the control
token that ends the turn. A second reading that shares none of this (readings.py) has to agree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.data.faults import RowFault
from shardwise.data.mask.template import LONGEST_STRUCTURE, Message, Spans, Template
from shardwise.data.rows import Chat

# A template may take such content apart (drop the thoughts of earlier turns), so it gets no short cut.
TAKEN_APART = re.compile(r"think>|THINK\]|<\|")
PLAIN = {"role", "content"}


class Turn(NamedTuple):
    """A supervised turn: its number in the conversation and its [start, end) in the text."""

    number: int
    start: int
    end: int


class Rendered(NamedTuple):
    """A chat as text, and the spans of its generation tags, if the template has any."""

    text: str
    tags: Spans | None


def wanted_turns(chat: Chat, supervise: str | tuple[str, ...]) -> list[int]:
    """Indices of the turns that carry loss. Raises RowFault when none does."""
    roles = ("assistant",) if isinstance(supervise, str) else supervise
    turns = [i for i, message in enumerate(chat.messages) if message["role"] in roles]
    chosen = [i for i in (turns[-1:] if supervise == "last" else turns) if chat.weights[i] > 0]
    if not chosen:
        raise RowFault("no_supervised", f"no turn of {len(chat.messages)} carries loss (data.supervise, "
                                        "`train: false` and `weight: 0` together leave none)")
    return chosen


def render_chat(chat: Chat, template: Template) -> Rendered:
    """Render a chat. Raises RowFault where the template refuses it."""
    if template.has_tags(chat.tools):
        return Rendered(*template.render_tagged(chat.messages, chat.tools))
    return Rendered(template.render(chat.messages, chat.tools), None)


def find_turns(text: str, chat: Chat, wanted: Sequence[int], template: Template) -> list[Turn]:
    """The wanted turns in a rendered chat. Raises RowFault naming the turn that cannot be found for certain."""
    messages = chat.messages
    places = foretold(text, chat, template)
    structure = template.structure(_roles(messages)) if places is not None else None
    if places is not None and structure is not None and all(structure.before[i] is not None for i in wanted):
        return [Turn(i, places[i][0] - (structure.before[i] or 0), places[i][1] + structure.after[i]) for i in wanted]
    _nothing_lost(text, messages)
    others = [i for i in wanted if messages[i]["role"] != "assistant"]
    if others:
        raise RowFault("mask_disagreement", f"turn {others[0]} ({messages[others[0]]['role']}): this conversation is "
                       "not printed turn by turn, and only assistant turns can be found in such a one; "
                       "set data.supervise=all")
    return [_by_prefix(text, i, chat, template) for i in wanted]


def _roles(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(message["role"] for message in messages)


def foretold(text: str, chat: Chat, template: Template) -> list[tuple[int, int]] | None:
    """[start, end) of every content, where the text is exactly the structure of these roles around them."""
    messages = chat.messages
    if chat.tools or len(messages) > LONGEST_STRUCTURE or any(m.keys() != PLAIN for m in messages):
        return None
    contents = [message["content"] for message in messages]
    if any(map(TAKEN_APART.search, contents)):
        return None
    structure = template.structure(_roles(messages))
    if structure is None:
        return None
    for attempt in (contents, [content.strip() for content in contents]):
        if text == _joined(structure.pieces, attempt):
            places, at = [], 0
            for piece, content in zip(structure.pieces, attempt, strict=False):
                at += len(piece)
                places.append((at, at + len(content)))
                at += len(content)
            return places
    return None


def _joined(pieces: Sequence[str], contents: Sequence[str]) -> str:
    parts = [""] * (2 * len(contents) + 1)
    parts[::2], parts[1::2] = pieces, contents
    return "".join(parts)


def _not_as_asked(turn: int, text: str, prompt: str) -> RowFault:
    return RowFault("mask_disagreement", f"turn {turn}: what the chat template prints before this answer is not what "
                    f"the model is asked with (first difference: {_difference(prompt, text)}); "
                    "data.supervise=last trains the last answer alone, or use a "
                    "template that prints a turn alike wherever it stands (data.chat_template=FILE)")


def _by_prefix(text: str, turn: int, chat: Chat, template: Template) -> Turn:
    messages, tools = chat.messages, chat.tools
    start = _start(text, turn, chat, template)
    until = template.render(messages[:turn + 1], tools)
    end = _end(text, start, turn, messages[turn], until if text.startswith(until) else None, template)
    own, answer = text[start:end], _said(messages[turn]["content"])
    lost = [call["function"]["name"] for call in messages[turn].get("tool_calls") or ()
            if call["function"]["name"] not in own]
    if lost or not any(answer in part for part in template.control_pattern.split(own)):
        raise RowFault("text_lost", f"turn {turn}: the chat template does not print {(lost or [answer])[0][:40]!r} "
                                    f"between its generation prompt and the turn's end ({own[:60]!r})")
    return Turn(turn, start, end)


def _start(text: str, turn: int, chat: Chat, template: Template) -> int:
    prompt = template.render(chat.messages[:turn], chat.tools, generation=True)
    if text.startswith(prompt):
        return len(prompt)
    if chat.messages[turn - 1]["role"] == "assistant":
        # Nobody is asked between two answers in a row, and a last answer may end unlike others. Where that alone
        # differs, the second one begins behind the header that follows the first.
        first = _by_prefix(text, turn - 1, chat, template)
        same = text[first.start:len(os.path.commonprefix([prompt, text]))]
        found = template.header_pattern.search(text, first.end)
        if _said(chat.messages[turn - 1]["content"]) in same and found and not text[first.end:found.start()].strip():
            return found.end()
    raise _not_as_asked(turn, text, prompt)


def _end(text: str, start: int, turn: int, message: Message, until: str | None, template: Template) -> int:
    if until is None:  # the template prints a last turn unlike others: the first end of a turn is this one's
        found = template.end_pattern.search(text, start)
        if found is None:
            raise RowFault("mask_disagreement", f"turn {turn}: its end cannot be found: the chat template prints it "
                           "unlike a last turn, and no control token ends it")
        return found.end()
    own = text[start:len(until)]
    controls = [(match.start(), match.end(), match.group()) for match in template.control_pattern.finditer(own)]
    said = _said(message["content"])
    if message.get("tool_calls"):
        chosen = controls[-1:]
    elif said and (last := _last_holding(said, template.control_pattern.split(own))) is not None:
        chosen = controls[last:last + 1]
    else:
        chosen = [c for c in controls if c[2] in template.ends][-1:]
    return start + chosen[0][1] if chosen else len(until)


def _last_holding(said: str, parts: Sequence[str]) -> int | None:
    """Number of the last stretch between control tokens that holds the words, which may be part of a token's name."""
    return next((n for n in range(len(parts) - 1, -1, -1) if said in parts[n]), None)


def _said(content: str) -> str:
    """The part of an answer that every template prints (some take the thoughts of earlier turns out)."""
    return content.rsplit("</think>", 1)[-1].strip()


def _nothing_lost(text: str, messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        if message["role"] in ("system", "developer", "user") and message["content"].strip() not in text:
            raise RowFault("text_lost", f"turn {i}: the chat template leaves out this {message['role']} turn's text "
                                        f"({message['content'].strip()[:40]!r})")


def _difference(prefix: str, text: str) -> str:
    at = len(os.path.commonprefix([prefix, text]))
    return f"{prefix[at:at + 30]!r} when asked, {text[at:at + 30]!r} here"
