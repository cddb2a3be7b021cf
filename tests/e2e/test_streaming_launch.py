"""Streamed data from the outside: to the end, and once more."""

from __future__ import annotations

from pathlib import Path

from launched import launch, metrics


def test_a_streamed_run_ends_like_any_other(tmp_path: Path) -> None:
    words = ["data.streaming=true", "schedule.epochs=null", "schedule.max_steps=4", "launch.processes=2",
             f"run.output_dir={tmp_path / 'run'}"]
    code, output = launch(*words, "run.stop_after=2")
    assert code == 3 and "Traceback" not in output, output[-2000:]
    code, output = launch(*words)
    assert code == 0 and "Traceback" not in output, output[-2000:]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "final" / "config.json").is_file()
    assert "streamed" in (tmp_path / "run" / "report.html").read_text()
    code, output = launch(*words)
    assert code == 0 and "already finished at step 4" in output, output[-2000:]
