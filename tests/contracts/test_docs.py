"""What the documents tell a user to type works, and what they say of the settings is current."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.config.load import load
from shardwise.config.reference import markdown

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
VALUED = ("--row", "--html")
STARTS = ("./launch.sh", "shardwise", "accelerate launch", "torchrun")


def commands() -> list[tuple[str, str]]:
    """(page, command) for every shell line of the documents that starts a recipe."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = line.split("  #")[0].strip()
                if line.startswith(STARTS) and ".yaml" in line:
                    found.append((page.name, line))
    return found


def test_settings_page_is_current():
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == markdown()


@pytest.mark.parametrize(("page", "command"), commands())
def test_documented_command_resolves(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    recipe = next(i for i, word in enumerate(words) if word.startswith("recipes/"))
    assert Path(words[recipe]).is_file(), f"{page}: {command}"
    settings = [word for i, word in enumerate(words) if i > recipe and word not in ("--dry-run", "--json", "--eval")
                and word not in VALUED and words[i - 1] not in VALUED]
    load(words[recipe], settings)
    for word in words[:recipe]:
        assert not word.startswith("accelerate_configs/") or Path(word).is_file(), f"{page}: {command}"


@pytest.mark.parametrize("command", [c for _, c in commands() if c.startswith("./launch.sh") and "tiny" in c])
def test_tiny_commands_pass_a_dry_run(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [sys.executable, "-m", "shardwise", "train", *shlex.split(command)[1:], "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "examples/step" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_in_documents_exist(page):
    for name in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("command", [c for _, c in commands() if c.startswith("shardwise data")])
def test_data_commands_work(command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    words = [sys.executable, "-m", "shardwise", *shlex.split(command.replace("row.html", f"{tmp_path}/row.html"))[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "supervised" in done.stdout or (tmp_path / "row.html").is_file()
