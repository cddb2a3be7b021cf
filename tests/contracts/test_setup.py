"""scripts/setup.sh with stand-ins for Python and pip: what it chooses, when it installs, what a failure leaves."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A python3 whose -m venv makes a copy of itself, whose -m pip writes down what it was asked for, and which fails
# where a file named `broken` lies beside the checkout.
PYTHON = """#!/usr/bin/env bash
root=@ROOT@
case "$*" in
    -V) echo "Python @VERSION@" ;;
    *"-m venv"*) sleep 0.2; rm -rf "${@: -1}"/*; mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
    *"-m pip"*) echo "$@" >>"$root/asked"; [ ! -e "$root/broken" ] || { echo "no such wheel"; exit 1; } ;;
    *find_spec*) [ -e "$root/active" ] ;;
    *version_info*) [ "@VERSION@" != 3.9.2 ] ;;
    *) echo "$@" >>"$root/ran" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    (folder / "scripts").mkdir(parents=True)
    for name in ("launch.sh", "scripts/setup.sh", "requirements.lock", "requirements-demo.lock",
                 "requirements-dev.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    place_python(folder, "3.12.1")
    return folder


def place_python(checkout: Path, version: str) -> None:
    tools = checkout / "tools"
    tools.mkdir(exist_ok=True)
    body = PYTHON.replace("@ROOT@", f"'{checkout}'").replace("@VERSION@", version)
    for name in ("python3", "python", "python3.11", "python3.12", "python3.13", "python3.14"):
        (tools / name).write_text(body)
        (tools / name).chmod(0o755)


def start(checkout: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([str(checkout / "launch.sh"), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, cwd=checkout, env={"PATH": f"{checkout / 'tools'}:/usr/bin:/bin"})


def launched(checkout: Path, *words: str) -> tuple[int, str]:
    process = start(checkout, *words)
    _, err = process.communicate(timeout=30)
    return process.returncode, err


def asked(checkout: Path) -> int:
    path = checkout / "asked"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_made_once_then_used_at_once(checkout: Path) -> None:
    code, err = launched(checkout, "r.yaml")
    assert code == 0 and len(err.splitlines()) == 3 and asked(checkout) == 3
    started = time.perf_counter()
    assert launched(checkout, "r.yaml", "a=b c") == (0, "")
    assert time.perf_counter() - started < 1
    assert asked(checkout) == 3
    run = "-m shardwise train r.yaml"
    assert (checkout / "ran").read_text().splitlines() == ["-m shardwise.train.ops", run, run + " a=b c"]


def test_an_active_environment_is_used(checkout: Path) -> None:
    (checkout / "active").touch()
    assert launched(checkout, "r.yaml") == (0, "")
    assert not (checkout / ".venv").exists() and (checkout / "ran").exists()


def test_a_failed_set_up_is_told_and_tried_again(checkout: Path) -> None:
    (checkout / "broken").touch()
    for _ in range(2):
        code, err = launched(checkout, "r.yaml")
        assert code == 1 and "no such wheel" in err and "tried again" in err and not (checkout / "ran").exists()
    (checkout / "broken").unlink()
    assert launched(checkout, "r.yaml")[0] == 0 and (checkout / "ran").exists()


def test_changed_locks_are_installed(checkout: Path) -> None:
    launched(checkout, "r.yaml")
    with open(checkout / "requirements.lock", "a") as file:
        file.write("more==1\n")
    launched(checkout, "r.yaml")
    assert asked(checkout) == 6


@pytest.mark.skipif(shutil.which("flock") is None, reason="two set-ups at once take turns only where flock exists")
def test_two_at_once_make_it_once(checkout: Path) -> None:
    both = [start(checkout, "r.yaml") for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
    assert asked(checkout) == 3 and len((checkout / "ran").read_text().splitlines()) == 3


def test_somebody_elses_venv_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/keep").touch()
    code, err = launched(checkout, "r.yaml")
    assert code == 1 and "was not made by this script" in err and (checkout / ".venv/keep").exists()


def test_an_old_python_is_refused_with_its_version(checkout: Path) -> None:
    place_python(checkout, "3.9.2")
    code, err = launched(checkout, "r.yaml")
    assert code == 1 and "Python 3.11 or newer" in err and "python3 is Python 3.9.2" in err


def test_a_recipe_of_the_checkout_runs_there(checkout: Path, tmp_path: Path) -> None:
    (checkout / "active").touch()
    (checkout / "recipe.yaml").touch()
    (checkout / "tools/python").unlink()
    (checkout / "tools/python3").write_text(
        f'#!/usr/bin/env bash\ncase "$*" in *find_spec*) ;; *) pwd >"{checkout}/where" ;; esac\n')
    env = {"PATH": f"{checkout / 'tools'}:/usr/bin:/bin"}
    for words, folder in ((["--dry-run", "recipe.yaml"], checkout), (["other.yaml"], tmp_path)):
        subprocess.run([str(checkout / "launch.sh"), *words], cwd=tmp_path, env=env, check=True)
        assert (checkout / "where").read_text().strip() == str(folder)
