"""Real tokenizers with real chat templates: what is supervised, token by token, against what a person wrote down.

The first tests check the written text itself, by the templates alone, so that it cannot be wrong in the same way as
the code it is there to judge.
"""

from __future__ import annotations

import functools
import json
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from pair_chats import CHATS
from pair_sources import MISTRAL_FILES, NoClient, run_mistral
from pairs import PAIRS, control_tokens, load, without_tags
from pairs_expected import EXPECTED, Refused
from shardwise.data.faults import RowFault
from shardwise.data.mask.encode import ChatEncoder
from shardwise.errors import ShardwiseError

ASKED = [(pair, chat) for pair in PAIRS for chat in EXPECTED[PAIRS[pair].expected or pair]]
TAGGED = [name for name, pair in PAIRS.items() if (pair.template or "").endswith("_training")]


def expected(pair: str, chat: str) -> tuple[str, ...] | Refused:
    return EXPECTED[PAIRS[pair].expected or pair][chat]


def cases(refused: bool) -> list[Any]:
    return [pytest.param(pair, chat, id=f"{pair}-{chat}") for pair, chat in ASKED
            if isinstance(expected(pair, chat), Refused) == refused]


@functools.cache
def tokenizer_of(pair: str) -> Any:
    try:
        return load(pair, tags=not PAIRS[pair].tags_disagree)
    except NoClient as error:
        pytest.skip(f"{pair}: {error}")


@functools.cache
def rendered(pair: str, chat: str, stop: int | None = None) -> str:
    """The template's text of a chat, or the prompt for its turn `stop`."""
    text: str = tokenizer_of(pair).apply_chat_template(
        CHATS[chat].messages[:stop], tools=CHATS[chat].tools, tokenize=False, add_generation_prompt=stop is not None)
    return text


@functools.cache
def own_ids(pair: str, chat: str, stop: int | None = None) -> list[int]:
    """The ids the tokenizer itself gives for that text."""
    ids: list[int] = tokenizer_of(pair).apply_chat_template(
        CHATS[chat].messages[:stop], tools=CHATS[chat].tools, tokenize=True, return_dict=False,
        add_generation_prompt=stop is not None)
    return ids


def answers(chat: str) -> list[int]:
    return [i for i, message in enumerate(CHATS[chat].messages) if message["role"] == "assistant"]


# --- the written text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pair", "chat"), cases(refused=False))
def test_the_expected_text_follows_its_generation_prompt(pair: str, chat: str) -> None:
    texts = expected(pair, chat)
    whole = rendered(pair, chat)
    assert len(texts) == len(answers(chat))
    for turn, text in zip(answers(chat), texts, strict=True):
        prompt = rendered(pair, chat, turn)
        assert whole.startswith(prompt)
        rest = whole[len(prompt):]
        assert (rest.lstrip() if PAIRS[pair].eats_space else rest).startswith(text)
        assert text.endswith(PAIRS[pair].ends)


@pytest.mark.parametrize(("pair", "chat"), cases(refused=True))
def test_what_is_to_be_refused_is_so_for_the_reason_given(pair: str, chat: str) -> None:
    reason = expected(pair, chat)
    assert isinstance(reason, Refused)
    if reason.kind == "raises":
        with pytest.raises(Exception):  # noqa: B017 - a template may raise anything
            rendered(pair, chat)
    elif reason.kind == "prompt":
        assert not all(rendered(pair, chat).startswith(rendered(pair, chat, turn)) for turn in answers(chat))
    else:
        assert reason.kind == "lost" and '"Paris"' not in rendered(pair, chat)


@pytest.mark.parametrize("pair", TAGGED)
def test_the_tags_of_a_training_template_disagree_where_it_is_said(pair: str) -> None:
    tokenizer = load(pair)
    agree = []
    for chat in ("system", "emoji"):
        batch = tokenizer.apply_chat_template(CHATS[chat].messages, return_dict=True, return_assistant_tokens_mask=True)
        tagged = runs(tokenizer, batch["input_ids"], batch["assistant_masks"])
        # A line end behind the terminator is the template's, and no model is asked to write it.
        agree.append(tuple(text.rstrip("\n") for text in tagged) == expected(pair, chat))
    assert all(agree) != PAIRS[pair].tags_disagree, agree


@pytest.mark.parametrize("pair", TAGGED)
def test_taking_the_tags_out_changes_nothing_that_is_printed(pair: str) -> None:
    tagged = load(pair)
    for chat in CHATS.values():
        try:
            before = tagged.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)
        except Exception:  # noqa: S112 - the template refuses this one
            continue
        plain = without_tags(tagged.chat_template)
        after = tagged.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False, chat_template=plain)
        assert "generation %" not in plain and after == before


def test_control_tokens_are_those_that_are_printed() -> None:
    assert control_tokens("{#- <|no|> -#}{{ '<|a|>' }}[X_TOOL]<｜b▁c｜><end_of_turn> [a] <x>"
                          "{{- raise_exception('<|no|>') }}") == ["<end_of_turn>", "<|a|>", "<｜b▁c｜>", "[X_TOOL]"]


# --- what our code makes of it ------------------------------------------------------------------------------


def runs(tokenizer: Any, ids: Any, weights: Any) -> list[str]:
    """The text of each unbroken run of supervised tokens."""
    groups = groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1] > 0)
    return [tokenizer.decode([int(i) for i, _ in group], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for supervised, group in groups if supervised]


def encode(tokenizer: Any, chats: list[str]) -> list[Any]:
    return list(ChatEncoder(tokenizer, template=None, supervise="all")([CHATS[chat] for chat in chats]))


@functools.cache
def encoded(pair: str) -> dict[str, Any]:
    """Every chat of a pair, in one call: a refused one among them must not harm the others."""
    names = [chat for name, chat in ASKED if name == pair]
    return dict(zip(names, encode(tokenizer_of(pair), names), strict=True))


def example(pair: str, chat: str) -> tuple[Any, Any]:
    result = encoded(pair)[chat]
    assert not isinstance(result, RowFault), result
    assert len(result) == 1
    return result[0].ids, result[0].weights


def starts(weights: Any) -> list[int]:
    return [i for i in range(len(weights)) if weights[i] > 0 and (i == 0 or weights[i - 1] == 0)]


@pytest.mark.parametrize(("pair", "chat"), cases(refused=False))
def test_exactly_the_expected_text_is_supervised(pair: str, chat: str) -> None:
    ids, weights = example(pair, chat)
    assert tuple(runs(tokenizer_of(pair), ids, weights)) == expected(pair, chat)
    assert set(np.unique(weights)) <= {0.0, 1.0} and weights[0] == 0
    assert len(ids) == len(weights)


@pytest.mark.parametrize(("pair", "chat"), cases(refused=False))
def test_each_turn_ends_with_its_supervised_terminator(pair: str, chat: str) -> None:
    ids, weights = example(pair, chat)
    ends = set(tokenizer_of(pair).convert_tokens_to_ids(list(PAIRS[pair].ends)))
    texts = expected(pair, chat)
    ended = sum(bool(weights[i] > 0 and (i + 1 == len(ids) or weights[i + 1] == 0) and ids[i] in ends)
                for i in range(len(ids)))
    assert ended == len(texts) == len(answers(chat))
    printed = sum(text.count(end) for text in texts for end in PAIRS[pair].ends)
    assert sum(bool(w > 0 and i in ends) for i, w in zip(ids, weights, strict=True)) == printed


@pytest.mark.parametrize(("pair", "chat"), cases(refused=False))
def test_what_is_not_supervised_holds_all_that_others_said(pair: str, chat: str) -> None:
    ids, weights = example(pair, chat)
    rest = [int(i) for i, w in zip(ids, weights, strict=True) if w == 0]
    text = tokenizer_of(pair).decode(rest, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for message in CHATS[chat].messages:
        if message["role"] != "assistant":
            assert message["content"].strip() in text


@pytest.mark.parametrize(("pair", "chat"), cases(refused=False))
def test_the_ids_before_an_answer_are_the_generation_prompts(pair: str, chat: str) -> None:
    ids, weights = example(pair, chat)
    whole = own_ids(pair, chat)
    clean = True
    for turn, start in zip(answers(chat), starts(weights), strict=True):
        prompt = own_ids(pair, chat, turn)
        if clean:  # behind a token that had to be cut, the tokenizer's own ids of the earlier answer are others
            assert list(ids[:start]) == prompt
        clean = clean and whole[:len(prompt)] == prompt
    if clean:
        assert list(ids) == whole
    else:
        decoded = [tokenizer_of(pair).decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                   for some in (list(map(int, ids)), whole)]
        assert decoded[0] == decoded[1]


def test_some_tokens_had_to_be_cut_and_most_not() -> None:
    """Else the two branches of the test above would not both be tried."""
    cut = {(pair, chat) for pair, chat in ASKED if not isinstance(expected(pair, chat), Refused)
           if any(own_ids(pair, chat)[:len(prompt)] != prompt
                  for prompt in (own_ids(pair, chat, turn) for turn in answers(chat)))}
    assert ("qwen2_5", "spaces") in cut and ("qwen3_6", "emoji") in cut
    assert len(cut) < 20


@pytest.mark.parametrize(("pair", "chat"), cases(refused=False))
def test_b15_one_bos_at_most_and_only_at_the_start(pair: str, chat: str) -> None:
    ids, _ = example(pair, chat)
    bos = tokenizer_of(pair).bos_token_id
    if PAIRS[pair].prints_bos:
        assert [i for i, token in enumerate(ids) if token == bos] == [0]
    elif bos is not None and tokenizer_of(pair).bos_token not in control_tokens(tokenizer_of(pair).chat_template):
        assert bos not in ids


@pytest.mark.parametrize(("pair", "chat"), cases(refused=True))
def test_what_cannot_be_certain_is_refused(pair: str, chat: str) -> None:
    result = encoded(pair)[chat]
    assert isinstance(result, RowFault), runs(tokenizer_of(pair), *result[0][:2])
    assert result.text


@pytest.mark.parametrize("pair", [name for name, pair in PAIRS.items() if pair.tags_disagree])
def test_tags_that_disagree_are_refused(pair: str) -> None:
    try:
        results = encode(load(pair), ["system", "emoji"])
    except ShardwiseError:
        return
    assert all(isinstance(result, RowFault) for result in results), results


# --- another program's ids ----------------------------------------------------------------------------------

MISTRAL_ENCODES = """
import json, sys
from pathlib import Path
import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
files, chats = map(json.loads, sys.argv[1:])
ids = {}
for name, file in files.items():
    path = Path(mistral_common.__file__).parent / "data" / file
    for mode in "finetuning", "test":
        tokenizer = MistralTokenizer.from_file(path, mode=ValidationMode(mode))
        for key, (messages, tools, wanted) in chats.items():
            if wanted == mode:
                request = ChatCompletionRequest(messages=messages, tools=tools)
                ids[f"{name} {key}"] = tokenizer.encode_chat_completion(request).tokens
print(json.dumps(ids))
"""
MISTRAL_CHATS = [chat for chat in CHATS if chat != "reasoning"]


@functools.cache
def mistral_ids() -> dict[str, list[int]]:
    """Mistral's own ids: `<pair> <chat>` for whole chats, `<pair> <chat> <turn>` for the prompt of a turn."""
    asked: dict[str, Any] = {}
    for chat in MISTRAL_CHATS:
        messages, tools = CHATS[chat].messages, CHATS[chat].tools
        asked[chat] = (messages, tools, "finetuning")
        for turn in answers(chat):
            if messages[turn - 1]["role"] != "assistant":  # it gives no prompt behind an answer
                asked[f"{chat} {turn}"] = (messages[:turn], tools, "test")
    ids: dict[str, list[int]] = json.loads(run_mistral(MISTRAL_ENCODES, json.dumps(MISTRAL_FILES), json.dumps(asked)))
    return ids


@pytest.mark.parametrize("chat", MISTRAL_CHATS)
@pytest.mark.parametrize("pair", MISTRAL_FILES)
def test_mistrals_own_encoder_gives_the_same_ids(pair: str, chat: str) -> None:
    theirs = mistral_ids()
    assert own_ids(pair, chat) == theirs[f"{pair} {chat}"]
    if isinstance(expected(pair, chat), Refused):
        return
    ids, weights = example(pair, chat)
    assert list(ids) == theirs[f"{pair} {chat}"]
    for turn, start in zip(answers(chat), starts(weights), strict=True):
        assert list(ids[:start]) == theirs[f"{pair} {chat} {turn}"]
