"""Real tokenizers with real chat templates: `load(name)` for a name in PAIRS.

`PYTHONPATH=tests:src python -m pairs` fetches everything and prints a line for each pair; the tests need no network
after that. A template is only put on a tokenizer in which each of its control tokens is one id (checked by `load`).
"""

from __future__ import annotations

import copy
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

from pair_sources import SOURCES, FetchError, NoClient, folder_of
from pair_tokenizers import tokenizer_of

CHATML, LLAMA, GEMMA, DEEPSEEK = ("<|im_end|>",), ("<|eot_id|>",), ("<end_of_turn>",), ("<｜end▁of▁sentence｜>",)
HARMONY = ("<|end|>", "<|return|>", "<|call|>")


@dataclass(frozen=True)
class Pair:
    """`template` is a file of trl's (without .jinja), or None for the one the tokenizer comes with."""

    tokenizer: str
    template: str | None
    ends: tuple[str, ...]
    """The control tokens that end an assistant turn."""
    prints_bos: bool = False
    expected: str = ""
    """The entry of pairs_expected.py where it is another pair's: a *_training variant renders as its original."""
    tags_disagree: bool = False
    """Its {% generation %} tags enclose something that is not the model's to write, or leave out what is."""
    eats_space: bool = False
    """The token that opens an assistant turn takes the white space behind it."""


PAIRS = {
    "qwen3": Pair("qwen3", None, CHATML),
    "qwen3_training": Pair("qwen3", "qwen3_training", CHATML),
    "qwen3_instruct_2507": Pair("qwen3", "qwen3_instruct_2507", CHATML),
    "qwen2_5": Pair("qwen3", "qwen2_5", CHATML),
    "qwen2_5_training": Pair("qwen3", "qwen2_5_training", CHATML, expected="qwen2_5", tags_disagree=True),
    "qwen3_5_nothink": Pair("qwen3_6", "qwen3_5_nothink", CHATML),
    "qwen3_6": Pair("qwen3_6", "qwen3_6", CHATML),
    "smollm2": Pair("smollm2", None, CHATML),
    "llama3": Pair("llama3_1", None, LLAMA, prints_bos=True),
    "llama3_training": Pair("llama3_1", "llama3_training", LLAMA, prints_bos=True, expected="llama3"),
    "llama3_2": Pair("llama3_1", "llama3_2", LLAMA, prints_bos=True),
    "gemma3": Pair("gemma3", None, GEMMA, prints_bos=True),
    "gemma3_training": Pair("gemma3", "gemma3_training", GEMMA, prints_bos=True, expected="gemma3"),
    "gemma": Pair("gemma3", "gemma", GEMMA, prints_bos=True),
    "deepseek_v3": Pair("deepseek_v3", None, DEEPSEEK, prints_bos=True),
    "deepseekv3": Pair("deepseek_v3", "deepseekv3", DEEPSEEK, prints_bos=True),
    "deepseekv3_training": Pair("deepseek_v3", "deepseekv3_training", DEEPSEEK, prints_bos=True,
                                tags_disagree=True),
    "gptoss": Pair("gptoss", "gptoss", HARMONY),
    "gptoss_training": Pair("gptoss", "gptoss_training", HARMONY, expected="gptoss", tags_disagree=True),
    "phi3": Pair("phi3", "phi3", ("<|end|>",), eats_space=True),
    "phi3_training": Pair("phi3", "phi3_training", ("<|end|>",), expected="phi3", tags_disagree=True,
                          eats_space=True),
    "mistral-v3": Pair("mistral-v3", None, ("</s>",), prints_bos=True),
    "mistral-v7": Pair("mistral-v7", None, ("</s>",), prints_bos=True),
    "mistral-tekken": Pair("mistral-tekken", None, ("</s>",), prints_bos=True),
}


def load(name: str, *, tags: bool = True) -> Any:
    """The pair's tokenizer with its template; `tags=False` takes the {% generation %} tags out of it."""
    pair = PAIRS[name]
    tokenizer = copy.copy(tokenizer_of(pair.tokenizer))
    if pair.template:
        tokenizer.chat_template = (folder_of("trl") / f"{pair.template}.jinja").read_text()
    broken = [text for text in control_tokens(tokenizer.chat_template) if len(_ids(tokenizer, text)) != 1]
    assert not broken, f"{name}: the tokenizer lacks the template's {broken}"
    if not tags:
        tokenizer.chat_template = without_tags(tokenizer.chat_template)
    return tokenizer


def without_tags(template: str) -> str:
    """The same template, white space control and all, with no {% generation %} in it."""
    template = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", template)


def control_tokens(template: str) -> list[str]:
    """What a template prints that has the look of a control token, without what it only speaks about."""
    code = re.sub(r"\{#.*?#\}|raise_exception\(.*?\)\s*-?\}\}", "", template, flags=re.DOTALL)
    return sorted(set(re.findall(r"<[|｜][^<>|｜\s]+[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]", code)))


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def main() -> int:
    """Fetch what is not there yet, for tests/run.sh."""
    for name in SOURCES:
        began = time.monotonic()
        try:
            folder_of(name)
        except NoClient as error:
            print(f"pairs: without {name}: {error}", file=sys.stderr)
        except FetchError as error:
            print(f"pairs: {name}: {error}", file=sys.stderr)
            return 1
        if time.monotonic() - began > 0.5:
            print(f"pairs: {name} fetched in {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
