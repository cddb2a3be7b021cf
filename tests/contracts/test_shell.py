"""Shell scripts: their syntax, and that the Slurm templates start the right launcher on each node (B72)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "launch.sh", ROOT / "scripts/setup.sh", ROOT / "tests/run.sh", ROOT / ".ci/run",
           *sorted((ROOT / "slurm").glob("*.sbatch"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_syntax(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert path.name == "setup.sh" or os.access(path, os.X_OK) or path.suffix == ".sbatch"


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_sbatch_head(path: Path) -> None:
    """Slurm reads its lines only before the first command, and only without shell variables in them."""
    lines = path.read_text().splitlines()
    directives = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[0] == "#!/usr/bin/env bash" and max(directives) < first_command
    head = "\n".join(lines[n] for n in directives)
    assert "$" not in head and "--signal=USR1@" in head and "--ntasks-per-node=1" in head


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text("#!/usr/bin/env bash\n" + body)
    path.chmod(0o755)


def submitted(tmp_path: Path, template: str, code: int) -> tuple[int, list[str], str]:
    """Run a template with Slurm's programs replaced: exit code, one line for each launcher, what was requeued."""
    stub(tmp_path, "launch.sh", f'printf "%s|" "$SLURM_NODEID" "$@" >>started; echo >>started; exit {code}\n')
    stub(tmp_path, "scontrol", '[ "$1" = show ] && printf "alpha\\nbeta\\n" || echo "$@" >>requeued\n')
    stub(tmp_path, "srun", 'while [ "${1#--}" != "$1" ]; do shift; done\n'
                           'for n in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$n "$@" || code=$?; done\n'
                           "exit ${code:-0}\n")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "123",
           "SLURM_NNODES": "2" if "multi" in template else "1", "SLURM_JOB_NODELIST": "[alpha,beta]",
           "SLURM_CPUS_PER_TASK": "4", "SLURM_NODEID": "0"}
    done = subprocess.run(["bash", str(ROOT / "slurm" / template), "recipes/x.yaml", "run.name=a b"],
                          env=env, capture_output=True, text=True, cwd="/")
    started, requeued = tmp_path / "started", tmp_path / "requeued"
    return (done.returncode, started.read_text().splitlines() if started.exists() else [],
            requeued.read_text() if requeued.exists() else "")


def test_b72_each_node_learns_its_own_rank(tmp_path: Path) -> None:
    code, started, requeued = submitted(tmp_path, "multi_node.sbatch", 0)
    rest = "launch.main_address=alpha|launch.main_port=20123|"
    assert started == [f"{rank}|recipes/x.yaml|run.name=a b|launch.nodes=2|launch.node_rank={rank}|{rest}"
                       for rank in (0, 1)]
    assert (code, requeued) == (0, "")


def test_one_node(tmp_path: Path) -> None:
    assert submitted(tmp_path, "single_node.sbatch", 0) == (0, ["0|recipes/x.yaml|run.name=a b|"], "")


@pytest.mark.parametrize("template", ["single_node.sbatch", "multi_node.sbatch"])
@pytest.mark.parametrize(("code", "requeued"), [(3, "requeue 123\n"), (1, ""), (2, "")])
def test_only_a_saved_stop_is_queued_again(tmp_path: Path, template: str, code: int, requeued: str) -> None:
    assert submitted(tmp_path, template, code)[::2] == (code, requeued)
