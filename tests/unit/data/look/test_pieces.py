"""The tokens of an example: exactly their part of the text, and nothing of it raw."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardwise import demo
from shardwise.data.look.pieces import Piece, pieces
from shardwise.data.rows import Encoded
from shardwise.errors import PreflightError

TINY: Any = AutoTokenizer.from_pretrained(Path(__file__).parents[4] / "recipes" / "tiny" / "tokenizer")
CHAT = "<|im_start|>user\nHi 🙂<|im_end|>"


@cache
def smollm2() -> Any:
    try:
        return AutoTokenizer.from_pretrained(demo.resolve("demo:smollm2-135m-instruct"))
    except PreflightError as missing:
        pytest.skip(str(missing))


@cache
def llama_like() -> Any:
    """Metaspace with byte fallback; `▁` alone, `▁hi`, `hi` and every byte."""
    vocabulary = ["<unk>", "<s>", "</s>", "▁", "h", "i", "▁h", "hi", "▁hi", *(f"<0x{b:02X}>" for b in range(256))]
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate(vocabulary)},
                                   [("▁", "h"), ("h", "i"), ("▁h", "i"), ("▁", "hi")], unk_token="<unk>",
                                   fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def word_piece() -> Any:
    vocabulary = {token: n for n, token in enumerate(["[UNK]", "play", "##ing", "now"])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def of(tokenizer: Any, text: str) -> list[Piece]:
    return of_ids(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def of_ids(tokenizer: Any, ids: list[int]) -> list[Piece]:
    return pieces(tokenizer, Encoded(np.array(ids, np.int32), np.zeros(len(ids), np.float32)))


def texts(tokenizer: Any, text: str) -> list[str]:
    return [piece.text for piece in of(tokenizer, text)]


def undone(shown: str) -> str:
    """The text behind the visible marks."""
    for mark, meant in {"⋯": "", "◌": "", "⟨⟩": "", "⏎\n": "\n", "·": " ", "⇥": "\t", "␍": "\r"}.items():
        shown = shown.replace(mark, meant)
    return re.sub(r"⟨U\+([0-9A-F]+)⟩", lambda found: chr(int(found[1], 16)), shown)


def test_a_character_shows_on_the_last_of_its_tokens() -> None:
    assert texts(TINY, CHAT) == ["<|im_start|>", "user", "⏎\n", "H", "i", "·", "⋯", "⋯", "⋯", "🙂", "<|im_end|>"]
    assert texts(smollm2(), CHAT) == ["<|im_start|>", "user", "⏎\n", "Hi", "·🙂", "<|im_end|>"]
    assert texts(llama_like(), "hi hi 🙂") == ["hi", "·hi", "·", "⋯", "⋯", "⋯", "🙂"]


def test_half_a_character_shows_as_its_bytes() -> None:
    ids = TINY("🙂")["input_ids"]
    assert [piece.text for piece in of_ids(TINY, [*ids[:2], 2, ids[3]])] == ["⟨f0⟩", "⟨9f⟩", "<|im_end|>", "⟨82⟩"]
    assert [piece.text for piece in of_ids(llama_like(), [9 + 0xF0, 9 + 0x9F, 5])] == ["⟨f0⟩", "⟨9f⟩", "i"]


def test_a_replacement_character_in_the_data_is_a_character() -> None:
    assert texts(TINY, "\ufffd") == ["⋯", "⋯", "\ufffd"]


def test_the_space_that_a_tokenizer_adds_is_not_shown_as_text() -> None:
    assert texts(llama_like(), "hi") == ["hi"]
    assert [piece.text for piece in of_ids(llama_like(), [3, 8])] == ["⟨⟩", "·hi"]


def test_a_tokenizer_that_spells_in_its_own_way_is_asked_to_decode() -> None:
    assert texts(word_piece(), "playing now") == ["play", "ing", "·now"]


def test_ids_weights_and_specials_are_kept() -> None:
    shown = pieces(TINY, Encoded(np.array([1, 42, 2], np.int32), np.array([0, 0.5, 1], np.float32)), example=3)
    assert shown == [Piece("<|im_start|>", 1, 0.0, True, 3), Piece("H", 42, 0.5, False, 3),
                     Piece("<|im_end|>", 2, 1.0, True, 3)]


def test_no_token_is_no_piece() -> None:
    assert of_ids(TINY, []) == []


@pytest.mark.parametrize(("raw", "shown"), [
    ("\x1b[31m", "⟨U+001B⟩[31m"), ("\x07\x9b\x00", "⟨U+0007⟩⟨U+009B⟩⟨U+0000⟩"), ("\u202e", "⟨U+202E⟩"),
    ("a\u200bb\u200d\ufeff", "a⟨U+200B⟩b⟨U+200D⟩⟨U+FEFF⟩"), ("\ufe0f\u3164", "⟨U+FE0F⟩⟨U+3164⟩"),
    ("\u2028\xa0", "⟨U+2028⟩⟨U+00A0⟩"), ("a\tb\r\n", "a⇥b␍⏎\n"), ("· ⟨x⟩", "⟨U+00B7⟩·⟨U+27E8⟩x⟨U+27E9⟩"),
    ("\u0301", "◌\u0301"), ("→ \\x1b é 日本", "→·\\x1b·é·日本")])
def test_what_does_not_print_is_spelt_out(raw: str, shown: str) -> None:
    assert "".join(texts(TINY, raw)).replace("⋯", "") == shown


HARD = "a  b\n\n\tc\r\n 🙂👩‍💻 نص ไทย \x1b[0m·⋯⟨f0⟩◌ <|im_end|> \ufffd na\u0308"


@given(st.text())
@example(HARD)
def test_the_pieces_join_to_the_decoded_text(text: str) -> None:
    for tokenizer in (TINY, llama_like()):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert undone("".join(piece.text for piece in of_ids(tokenizer, ids))) == whole


def test_the_pieces_of_the_demo_model_join_to_the_text() -> None:
    assert undone("".join(texts(smollm2(), HARD))) == HARD
