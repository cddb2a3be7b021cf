"""The conversations that every pair of pairs.py is tried on."""

from __future__ import annotations

from typing import Any

from shardwise.data.rows import Chat

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}},
                       "required": ["city"]},
    },
}
# Nine characters: what Mistral's templates ask of an id.
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


def _chat(*turns: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> Chat:
    return Chat([dict(turn) for turn in turns], [1.0] * len(turns), tools)


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CHATS = {
    "system": _chat(_system("Be brief."), _user("Capital of France?"), _answer("Paris."),
                    _user("And of Italy?"), _answer("Rome.")),
    "emoji": _chat(_user("Say ok 🎉\r\nplease"), _answer("Hé 🎉\r\nok")),
    "spaces": _chat(_user("Now spaces"), _answer("  spaced \n"), _user("Now lines"), _answer("\n\nnext")),
    "tools": _chat(_user("Weather in Paris?"), _answer("", tool_calls=[CALL]),
                   {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "18 °C"},
                   _answer("It is 18 °C."), tools=[WEATHER]),
    "thinking": _chat(_user("Question one"), _answer("<think>\nplan one\n</think>\n\nfirst"),
                      _user("Question two"), _answer("<think>\nplan two\n</think>\n\nsecond")),
    # Templates read thoughts that are kept apart from the answer under one of two names.
    "reasoning": _chat(_user("Question one"), _answer("first", reasoning_content="plan one", thinking="plan one"),
                       _user("Question two"), _answer("second", reasoning_content="plan two", thinking="plan two")),
    "two answers": _chat(_user("Count."), _answer("one"), _answer("two")),
}
