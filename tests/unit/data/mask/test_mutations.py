"""The tests of this folder must fail for the mistakes they are there to catch, put into the encoder one by one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from tokenizers.processors import TemplateProcessing

from shardwise.data.faults import RowFault
from shardwise.data.mask import encode, tokens
from shardwise.data.rows import Chat
from unit.data.mask import test_chat, test_encode, test_pairs

Mutant = Callable[[], AbstractContextManager[Any]]


def spans(change: Callable[[int, int], tuple[int, int]]) -> Mutant:
    """The tokens that carry loss, [first, stop), moved."""
    real = encode.ChatEncoder._within
    return lambda: patch.object(encode.ChatEncoder, "_within", lambda *args: change(*real(*args)))


def wanted_with_user() -> AbstractContextManager[Any]:
    """A user's turn learnt like an answer."""
    def wanted(chat: Chat, supervise: Any) -> list[int]:
        return [i for i, message in enumerate(chat.messages) if message["role"] in ("user", "assistant")]
    return patch.object(encode, "wanted_turns", wanted)


def uncut() -> AbstractContextManager[Any]:
    """Tokens left as they are where one reaches from the prompt into the answer."""
    return patch.object(tokens.TextTokenizer, "cut", lambda self, found, *args, **more: found)


def undisguised() -> AbstractContextManager[Any]:
    """Control tokens found in what somebody wrote."""
    return patch.object(encode, "disguise", lambda *args: None)


def one_reading() -> AbstractContextManager[Any]:
    """Nothing compares the two readings."""
    return patch.object(encode, "compare", lambda *args: None)


def added_tokens() -> AbstractContextManager[Any]:
    """The tokenizer's own BOS on top of the one that the template prints."""
    def with_them(self: Any, texts: list[str]) -> list[tokens.Tokens]:
        return [tokens.Tokens(e.ids, e.offsets) for e in self.whole.encode_batch(texts, add_special_tokens=True)]
    return patch.object(tokens.TextTokenizer, "encode", with_them)


@contextlib.contextmanager
def added_tokens_unseen() -> Iterator[None]:
    """The same, where the encoder does not look for it either."""
    class Blind(encode.ChatEncoder):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.bos = None
    with added_tokens(), patch.object(encode, "ChatEncoder", Blind):
        yield


def one_bos() -> None:
    """A template that prints BOS, on a tokenizer that would add it too: one, at the start, without loss."""
    tokenizer = copy.deepcopy(test_encode.TOKENS)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)])
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    encoder = encode.ChatEncoder(tokenizer, template="{{ bos_token }}" + tokenizer.chat_template, supervise="all")
    found = encoder([Chat(test_encode.TWO_TURNS, [1.0] * 4)])[0]
    assert not isinstance(found, RowFault), found
    ids, weights, _ = found[0]
    assert [i for i, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0] and weights[0] == 0
    assert test_encode.learnt(found[0]) == "hello there<|im_end|>bye now<|im_end|>"


def real_pair(test: Callable[[str, str], None]) -> Callable[[], None]:
    def check() -> None:
        test_pairs.encoded.cache_clear()
        try:
            test("smollm2", "system")
        finally:
            test_pairs.encoded.cache_clear()
    return check


CHECKS: dict[str, Callable[[], None]] = {
    "text": test_encode.test_the_supervised_text_is_the_answers_and_their_end,
    "end": test_encode.test_the_end_is_learnt_and_the_newline_after_it_is_not,
    "ids": test_encode.test_b27_the_ids_are_the_tokenizers_own_render,
    "turn": test_chat.test_a_turn_is_what_the_model_has_to_write,
    "terminator": test_chat.test_b17_the_end_of_a_turn_is_learnt_whatever_eos_is,
    "last": test_chat.test_b19_a_last_turn_may_end_otherwise,
    "weights": test_chat.test_weights_of_messages,
    "tags": test_chat.test_tags_on_what_is_no_answer_are_an_error,
    "join": lambda: test_encode.test_an_answer_that_would_join_the_prompt_is_cut_from_it("  They\tare   kept  "),
    "marker": lambda: test_encode.test_control_tokens_as_text_are_ordinary_text("stop<|im_end|>now", 1),
    "bos": one_bos,
    "pair text": real_pair(test_pairs.test_exactly_the_expected_text_is_supervised),
    "pair end": real_pair(test_pairs.test_each_turn_ends_with_its_supervised_terminator),
    "pair prompt": real_pair(test_pairs.test_the_ids_before_an_answer_are_the_generation_prompts),
    "pair others": real_pair(test_pairs.test_what_is_not_supervised_holds_all_that_others_said),
}
MUTANTS: dict[str, tuple[Mutant, str]] = {
    "one token to the right": (spans(lambda first, stop: (first + 1, stop + 1)),
                               "text, end, turn, weights, join, marker, bos, pair text, pair end, pair prompt"),
    "one token to the left": (spans(lambda first, stop: (first - 1, stop - 1)),
                              "text, end, turn, terminator, last, weights, join, marker, bos, pair text, pair end, "
                              "pair prompt"),
    "one token too early": (spans(lambda first, stop: (first - 1, stop)),
                            "text, turn, last, weights, join, marker, bos, pair text, pair prompt"),
    "no terminator": (spans(lambda first, stop: (first, stop - 1)),
                      "text, end, turn, terminator, last, weights, join, marker, bos, pair text, pair end"),
    "the newline too": (spans(lambda first, stop: (first, stop + 1)),
                        "text, end, turn, weights, join, marker, bos, pair text, pair end"),
    "a user's turn": (wanted_with_user, "text, turn, terminator, last, marker, pair text, pair prompt, pair others"),
    "nothing cut": (uncut, "join, marker"),
    "control tokens in text": (undisguised, "marker"),
    "one reading": (one_reading, "tags"),
    "BOS twice": (added_tokens, "bos"),
    "BOS twice and unseen": (added_tokens_unseen, "bos"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_mistake_they_pass(check: str) -> None:
    CHECKS[check]()


@pytest.mark.parametrize(("mistake", "check"), [
    pytest.param(name, check, id=f"{name}-{check}") for name, (_, checks) in MUTANTS.items()
    for check in checks.split(", ")])
def test_a_mistake_is_seen(mistake: str, check: str) -> None:
    with MUTANTS[mistake][0](), pytest.raises((AssertionError, RowFault)):
        CHECKS[check]()
