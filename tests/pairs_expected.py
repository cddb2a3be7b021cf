"""What is to be supervised of each assistant turn: written down from reading the templates, by pair and chat.

It is all that the model has to write after the generation prompt, through the control token that ends its turn, and
nothing behind that. EXPECTED[pair][chat] has a text for each assistant turn, or says why there can be none. A pair
without an entry for a chat is not asked about it: "reasoning" is only for templates that read the thoughts.
"""

from __future__ import annotations

from typing import NamedTuple


class Refused(NamedTuple):
    kind: str
    """`raises`: the template does; `prompt`: its generation prompt is not what it prints before that answer;
    `lost`: it leaves out what was said."""
    why: str


Expected = dict[str, dict[str, "tuple[str, ...] | Refused"]]

LOST_CALL = Refused("lost", "the call of the tool is not printed")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
EMPTY = "<think>\n\n</think>\n\n"
ONE, TWO = "<think>\nplan one\n</think>\n\nfirst", "<think>\nplan two\n</think>\n\nsecond"

# Every answer as it is, then <|im_end|>.
_CHATML: dict[str, tuple[str, ...] | Refused] = {
    "system": ("Paris.<|im_end|>", "Rome.<|im_end|>"),
    "emoji": ("Hé 🎉\r\nok<|im_end|>",),
    "spaces": ("  spaced \n<|im_end|>", "\n\nnext<|im_end|>"),
    "tools": (f"{CALL}<|im_end|>", "It is 18 °C.<|im_end|>"),
    "thinking": (f"{ONE}<|im_end|>", f"{TWO}<|im_end|>"),
    "two answers": ("one<|im_end|>", "two<|im_end|>"),
}

# Only behind the last question are thoughts kept. The last of all turns shows them even where there were none; a
# turn between the last question and that one only where it has some.
_QWEN3: dict[str, tuple[str, ...] | Refused] = {
    "system": ("Paris.<|im_end|>", f"{EMPTY}Rome.<|im_end|>"),
    "emoji": (f"{EMPTY}Hé 🎉\r\nok<|im_end|>",),
    "spaces": ("  spaced \n<|im_end|>", f"{EMPTY}next<|im_end|>"),
    "tools": (f"{CALL}<|im_end|>", f"{EMPTY}It is 18 °C.<|im_end|>"),
    "thinking": ("first<|im_end|>", f"{TWO}<|im_end|>"),
    "reasoning": ("first<|im_end|>", f"{TWO}<|im_end|>"),
    "two answers": Refused("prompt", "the prompt for the second answer shows the first with an empty thought, which "
                                     "the whole chat does not"),
}

# Every turn has its thoughts, empty ones too, and loses only line ends in front of the answer.
_QWEN3_TRAINING: dict[str, tuple[str, ...] | Refused] = {
    "system": (f"{EMPTY}Paris.<|im_end|>", f"{EMPTY}Rome.<|im_end|>"),
    "emoji": (f"{EMPTY}Hé 🎉\r\nok<|im_end|>",),
    "spaces": (f"{EMPTY}  spaced \n<|im_end|>", f"{EMPTY}next<|im_end|>"),
    "tools": (f"{EMPTY}{CALL}<|im_end|>", f"{EMPTY}It is 18 °C.<|im_end|>"),
    "thinking": (f"{ONE}<|im_end|>", f"{TWO}<|im_end|>"),
    "reasoning": (f"{ONE}<|im_end|>", f"{TWO}<|im_end|>"),
    "two answers": (f"{EMPTY}one<|im_end|>", f"{EMPTY}two<|im_end|>"),
}

# The generation prompt opens the thought (qwen3_6), or shows an empty one (nothink). Turns before the last question
# are printed without. Answers are trimmed.
_OPENED = Refused("prompt", "the prompt ends with '<think>\\n', which an answer before the last question lacks")
_SHUT = Refused("prompt", "the prompt ends with an empty thought, which an answer before the last question lacks")
_QWEN3_6: dict[str, tuple[str, ...] | Refused] = {
    "system": _OPENED,
    "emoji": ("\n</think>\n\nHé 🎉\r\nok<|im_end|>",),
    "spaces": _OPENED,
    "tools": (f"\n</think>\n\n{XML_CALL}<|im_end|>", "\n</think>\n\nIt is 18 °C.<|im_end|>"),
    "thinking": _OPENED,
    "reasoning": _OPENED,
    "two answers": ("\n</think>\n\none<|im_end|>", "\n</think>\n\ntwo<|im_end|>"),
}
_QWEN3_5_NOTHINK: dict[str, tuple[str, ...] | Refused] = {
    "system": _SHUT,
    "emoji": ("Hé 🎉\r\nok<|im_end|>",),
    "spaces": _SHUT,
    "tools": (f"{XML_CALL}<|im_end|>", "It is 18 °C.<|im_end|>"),
    "thinking": _SHUT,
    "reasoning": _SHUT,
    "two answers": ("one<|im_end|>", "two<|im_end|>"),
}

# Answers are trimmed at both ends.
_LLAMA3: dict[str, tuple[str, ...] | Refused] = {
    "system": ("Paris.<|eot_id|>", "Rome.<|eot_id|>"),
    "emoji": ("Hé 🎉\r\nok<|eot_id|>",),
    "spaces": ("spaced<|eot_id|>", "next<|eot_id|>"),
    "tools": LOST_CALL,
    "thinking": (f"{ONE}<|eot_id|>", f"{TWO}<|eot_id|>"),
    "two answers": ("one<|eot_id|>", "two<|eot_id|>"),
}
_LLAMA3_2 = _LLAMA3 | {
    "tools": ('{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>', "It is 18 °C.<|eot_id|>"),
}

_ALTERNATE = Refused("raises", "roles must alternate")
_GEMMA3: dict[str, tuple[str, ...] | Refused] = {
    "system": ("Paris.<end_of_turn>", "Rome.<end_of_turn>"),
    "emoji": ("Hé 🎉\r\nok<end_of_turn>",),
    "spaces": ("spaced<end_of_turn>", "next<end_of_turn>"),
    "tools": _ALTERNATE,
    "thinking": (f"{ONE}<end_of_turn>", f"{TWO}<end_of_turn>"),
    "two answers": _ALTERNATE,
}

_DEEPSEEK: dict[str, tuple[str, ...] | Refused] = {
    "system": ("Paris.<｜end▁of▁sentence｜>", "Rome.<｜end▁of▁sentence｜>"),
    "emoji": ("Hé 🎉\r\nok<｜end▁of▁sentence｜>",),
    "spaces": ("  spaced \n<｜end▁of▁sentence｜>", "\n\nnext<｜end▁of▁sentence｜>"),
    "tools": Refused("lost", "a call is printed only where the content is null, not where it is empty"),
    "thinking": (f"{ONE}<｜end▁of▁sentence｜>", f"{TWO}<｜end▁of▁sentence｜>"),
    "two answers": ("one<｜end▁of▁sentence｜>", "two<｜end▁of▁sentence｜>"),
}
# The prompt opens a thought, and no answer is ever printed with one.
_NO_THOUGHT = Refused("prompt", "the prompt ends with '<think>\\n', which no answer has")
_DEEPSEEK_OPENED: dict[str, tuple[str, ...] | Refused] = dict.fromkeys(
    ("system", "emoji", "spaces", "tools", "thinking", "two answers"), _NO_THOUGHT)

# The prompt stops behind `assistant`, so the channel is the model's to write, and to whom a call goes. The last
# answer ends with <|return|>, those before it with <|end|>, a call with <|call|>; thoughts stand in a message of
# their own before the last answer, whose header is therefore the model's to write as well.
_FINAL = "<|channel|>final<|message|>"
_GPTOSS: dict[str, tuple[str, ...] | Refused] = {
    "system": (f"{_FINAL}Paris.<|end|>", f"{_FINAL}Rome.<|return|>"),
    "emoji": (f"{_FINAL}Hé 🎉\r\nok<|return|>",),
    "spaces": (f"{_FINAL}  spaced \n<|end|>", f"{_FINAL}\n\nnext<|return|>"),
    "tools": (' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
              f"{_FINAL}It is 18 °C.<|return|>"),
    "thinking": (f"{_FINAL}{ONE}<|end|>", f"{_FINAL}{TWO}<|return|>"),
    "reasoning": (f"{_FINAL}first<|end|>",
                  f"<|channel|>analysis<|message|>plan two<|end|><|start|>assistant{_FINAL}second<|return|>"),
    "two answers": (f"{_FINAL}one<|end|>", f"{_FINAL}two<|return|>"),
}

# Ends with <|end|>; the <|endoftext|> behind a whole chat belongs to no turn. <|assistant|> takes all white space
# behind it into its own token, in the prompt as in the chat, so an answer cannot begin with any.
_PHI3: dict[str, tuple[str, ...] | Refused] = {
    "system": ("Paris.<|end|>", "Rome.<|end|>"),
    "emoji": ("Hé 🎉\r\nok<|end|>",),
    "spaces": ("spaced \n<|end|>", "next<|end|>"),
    "tools": LOST_CALL,
    "thinking": (f"{ONE}<|end|>", f"{TWO}<|end|>"),
    "two answers": ("one<|end|>", "two<|end|>"),
}

# The space behind [/INST] is not in the prompt. Answers that follow each other become one.
_MERGED = Refused("prompt", "two answers in a row are printed as one")
_MISTRAL_CALL = '[{"name": "weather", "arguments": {"city": "Paris"}, "id": "call12345"}]</s>'
_MISTRAL_V7: dict[str, tuple[str, ...] | Refused] = {
    "system": (" Paris.</s>", " Rome.</s>"),
    "emoji": (" Hé 🎉\r\nok</s>",),
    "spaces": ("   spaced \n</s>", " \n\nnext</s>"),
    "tools": (f"[TOOL_CALLS] {_MISTRAL_CALL}", " It is 18 °C.</s>"),
    "thinking": (f" {ONE}</s>", f" {TWO}</s>"),
    "two answers": _MERGED,
}
_MOVES = Refused("prompt", "the system text stands before the last question of the chat, wherever that is")
_MISTRAL_TEKKEN: dict[str, tuple[str, ...] | Refused] = {
    "system": _MOVES,
    "emoji": ("Hé 🎉\r\nok</s>",),
    "spaces": ("  spaced \n</s>", "\n\nnext</s>"),
    "tools": (f"[TOOL_CALLS]{_MISTRAL_CALL}", "It is 18 °C.</s>"),
    "thinking": (f"{ONE}</s>", f"{TWO}</s>"),
    "two answers": _MERGED,
}

EXPECTED: Expected = {
    "qwen3": _QWEN3,
    "qwen3_training": _QWEN3_TRAINING,
    "qwen3_instruct_2507": _CHATML,
    "qwen2_5": _CHATML,
    "qwen3_5_nothink": _QWEN3_5_NOTHINK,
    "qwen3_6": _QWEN3_6,
    "smollm2": _CHATML | {"tools": LOST_CALL},
    "llama3": _LLAMA3,
    "llama3_2": _LLAMA3_2,
    "gemma3": _GEMMA3,
    "gemma": _GEMMA3 | {"system": Refused("raises", "no system role")},
    "deepseek_v3": _DEEPSEEK,
    "deepseekv3": _DEEPSEEK_OPENED | {"tools": Refused("raises", "it adds the call's arguments to a text")},
    "deepseekv3_training": _DEEPSEEK_OPENED,
    "gptoss": _GPTOSS,
    "phi3": _PHI3,
    "mistral-v3": _MISTRAL_V7 | {"system": _MOVES},
    "mistral-v7": _MISTRAL_V7,
    "mistral-tekken": _MISTRAL_TEKKEN,
}
