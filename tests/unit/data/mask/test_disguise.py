"""Control tokens that somebody wrote as text: exactly that text, beside any other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import AutoTokenizer

from dist.given import TOKENIZER
from shardwise.data.faults import RowFault
from shardwise.data.mask.disguise import CANDIDATES
from shardwise.data.mask.encode import ChatEncoder
from shardwise.data.mask.tokens import ANCHOR
from shardwise.data.rows import Chat

TOKENS: Any = AutoTokenizer.from_pretrained(TOKENIZER)
MORE: Any = copy.deepcopy(TOKENS)
MORE.add_special_tokens({"additional_special_tokens": ["<bos>", "<pad>"]})
MORE.add_tokens(["<call>", "<think>"])  # behind special ones, and not in the model's own vocabulary
FIRST = chr(CANDIDATES[0])


def result(question: str, answer: str, tokenizer: Any = TOKENS, template: str | None = None, **more: Any) -> Any:
    chat = Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}], [1.0, 1.0])
    return ChatEncoder(tokenizer, template=template, supervise="all")([chat])[0]


@pytest.mark.parametrize("other", [ANCHOR, ANCHOR * 2, ANCHOR * 7 + "x" + ANCHOR, FIRST, FIRST * 10, "\uf600",
                                   "\uf5a01"])
@pytest.mark.parametrize("marker", ["", "<|im_end|>", "<|im_end|><|im_end|>", "<|im_start|>x<|im_end|>"])
def test_no_character_is_taken_for_one_of_ours(marker: str, other: str) -> None:
    for question, answer in ((f"{other}{marker} and more", f"  {other}"), ("q", f"{marker}{other}"), (marker, other)):
        ids, weights, notes = result(question, answer)[0]
        assert TOKENS.decode(ids) == (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                                      f"{answer}<|im_end|>\n")
        assert TOKENS.decode(ids[weights > 0]) == f"{answer}<|im_end|>"
        assert max(ids) < len(TOKENS) and notes == (("marker_text",) if marker else ())


def test_added_tokens_beside_a_marker_keep_their_ids() -> None:
    assert MORE.convert_tokens_to_ids(["<bos>", "<pad>", "<call>", "<think>"]) == [1024, 1025, 1026, 1027]
    ids, weights, _ = result("<|im_end|> <call>", "<think>a<bos></think>", MORE)[0]
    assert [i for i in ids.tolist() if i >= 1024] == [1026, 1027]  # <bos> is ordinary text
    assert MORE.decode(ids[weights > 0]) == "<think>a<bos></think><|im_end|>"


def test_a_template_that_shows_an_object_as_python_does() -> None:
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls or '' }}<|im_end|>\n"
                "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    call = {"function": {"name": "f", "arguments": {"a": "<|im_end|>"}}}
    ids, weights, _ = result("q", "", template=template, tool_calls=[call])[0]
    assert TOKENS.decode(ids[weights > 0]) == f"{[call]}<|im_end|>"


def test_a_template_that_takes_the_text_apart_is_refused() -> None:
    template = TOKENS.chat_template.replace("message['content']", "message['content'].split('<|im_end|>')[0]")
    assert template != TOKENS.chat_template
    found = result("q<|im_end|>r", "a", template=template)
    assert isinstance(found, RowFault) and found.kind == "mask_disagreement"
    assert found.text == ("text equal to a control token (<|im_end|>) is not printed as it stands: the chat template "
                          "takes it apart or changes it")


@pytest.mark.parametrize("answer", ["end", "_end", "d", "<|im", "im_start", "|", "</think>d", "start end"])
def test_an_answer_that_is_part_of_a_control_tokens_name(answer: str) -> None:
    """Its end is looked for behind its text, which the token that ends it holds as well."""
    template = TOKENS.chat_template.replace("message['content']", "message['content'] + (message.name or '')")
    ids, weights, notes = result("q", answer, template=template, name="")[0]
    assert TOKENS.decode(ids[weights > 0]) == f"{answer}<|im_end|>" and notes == ()
