"""A conversation that is too long, split between exchanges: each part keeps its turns whole and the system turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwise.data.faults import RowFault
from shardwise.data.rows import Chat, Encoded

Encode = Callable[[Chat], list[Encoded] | RowFault]
"""One conversation to its example, or a fault, of the kind too_long where it does not fit."""
HEAD = ("system", "developer")


def split(chat: Chat, wanted: Sequence[int], encode: Encode, *, share: float) -> list[Encoded] | RowFault:
    """The parts of a chat that fit, each as full as can be; a turn of `wanted` is trained in just one of them.

    `share`: roughly the part of the whole that fits. An exchange (a user turn and all that follows until the
    next) that does not fit alone is left out and noted on the other parts; where nothing is left, the fault is
    returned.
    """
    chosen = set(wanted)
    chat = replace(chat, weights=[weight if i in chosen else 0.0 for i, weight in enumerate(chat.weights)])
    bounds = _exchanges(chat)
    parts: list[Encoded] = []
    fault, lost, first = RowFault("no_supervised", "no part of it carries loss"), False, 0
    while first < len(bounds) - 1:
        stop, result = _fullest(chat, bounds, first, encode, share)
        if not isinstance(result, RowFault):
            parts += result
        elif result.kind != "no_supervised":  # without a trained turn it was only context
            fault, lost = result, True
        first = stop
    if not parts:
        return fault
    notes = ("split", "split_lost") if lost else ("split",)
    return [example._replace(notes=(*example.notes, *notes)) for example in parts]


def _fullest(chat: Chat, bounds: Sequence[int], first: int, encode: Encode,
             share: float) -> tuple[int, list[Encoded] | RowFault]:
    """(stop, what exchanges first..stop come to) for the largest stop that fits; first + 1 where none does."""
    stop = min(_guess(chat, bounds, first, share), len(bounds) - 1)
    result = encode(_part(chat, bounds, first, stop))
    while _too_long(result) and stop > first + 1:
        stop -= 1
        result = encode(_part(chat, bounds, first, stop))
    while not _too_long(result) and stop < len(bounds) - 1:
        longer = encode(_part(chat, bounds, first, stop + 1))
        if _too_long(longer):
            break
        stop, result = stop + 1, longer
    return stop, result


def _too_long(result: list[Encoded] | RowFault) -> bool:
    return isinstance(result, RowFault) and result.kind == "too_long"


def _guess(chat: Chat, bounds: Sequence[int], first: int, share: float) -> int:
    sizes = [sum(len(str(message)) for message in chat.messages[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    room = share * sum(sizes)
    stop = first + 1
    while stop < len(sizes) and sum(sizes[first:stop + 1]) <= room:
        stop += 1
    return stop


def _exchanges(chat: Chat) -> list[int]:
    """Where exchanges begin, and the end: at every user turn that does not follow another."""
    roles = [message["role"] for message in chat.messages]
    head = next((i for i, role in enumerate(roles) if role not in HEAD), len(roles))
    return [i for i in range(head, len(roles))
            if i == head or (roles[i] == "user" and roles[i - 1] != "user")] + [len(roles)]


def _part(chat: Chat, bounds: Sequence[int], first: int, stop: int) -> Chat:
    head, chosen = slice(0, bounds[0]), slice(bounds[first], bounds[stop])
    return replace(chat, messages=chat.messages[head] + chat.messages[chosen],
                   weights=chat.weights[head] + chat.weights[chosen])
