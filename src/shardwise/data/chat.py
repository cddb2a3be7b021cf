"""Which characters of a rendered chat carry loss, by prefixes of the template's own output.

For the assistant turn i, the render of the turns before it with the generation prompt must be a literal
prefix of the whole render, and so must the render up to and including it. The difference is the turn as the
model has to write it, terminator included. A template for which this does not hold is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardwise.errors import DataError

Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""(messages, add_generation_prompt) -> text."""


class Rendered(NamedTuple):
    """A chat as text and the [start, end) character spans of its supervised assistant turns."""

    text: str
    spans: list[tuple[int, int]]


def render_chat(messages: Sequence[dict[str, Any]], render: Render, *, supervise: str, place: str) -> Rendered:
    """Render a chat and find its assistant turns. Raises DataError naming row and turn where it cannot."""
    text = _rendered(render, messages, False, place)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for turn in turns if supervise == "all" else turns[-1:]:
        prompt = _rendered(render, messages[:turn], True, place)
        until = text if turn + 1 == len(messages) else _rendered(render, messages[:turn + 1], False, place)
        for what, prefix in (("before", prompt), ("up to", until)):
            if not text.startswith(prefix):
                raise DataError(
                    f"{place}: the chat template is not prefix-stable at turn {turn}: its output {what} this turn "
                    f"is not a prefix of the whole (first difference: {_difference(prefix, text)}). "
                    "Use a template that renders a turn alike wherever it stands (data.chat_template=FILE)")
        if messages[turn]["content"].strip() not in text[len(prompt):len(until)]:
            raise DataError(f"{place}: turn {turn}: the template does not print this answer after its own "
                            f"generation prompt ({prompt[-40:]!r}); use a template that does")
        spans.append((len(prompt), len(until)))
    return Rendered(text, spans)


def _rendered(render: Render, messages: Sequence[dict[str, Any]], generation: bool, place: str) -> str:
    try:
        return render(messages, generation)
    except Exception as error:  # a template may raise anything: jinja errors, its own messages
        raise DataError(f"{place}: the chat template refuses the first {len(messages)} turns: {error}") from None


def _difference(prefix: str, text: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), min(len(prefix), len(text)))
    return f"{prefix[at:at + 30]!r} against {text[at:at + 30]!r}"
