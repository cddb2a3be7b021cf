"""wandb is told by rank 0 alone, under one id for one run, and can never end a training (cases B63, B65, B66)."""

from __future__ import annotations

import socket

import pytest

from dist.harness import spawn

WANDB = ["tracking.backends=[wandb]", "data.eval=[]", "schedule.max_steps=5", "checkpoint.every_steps=2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    with socket.socket() as closed:  # bound and never listening: a connection is refused at once
        closed.bind(("127.0.0.1", 0))
        down = {"WANDB_BASE_URL": f"http://127.0.0.1:{closed.getsockname()[1]}", "WANDB_API_KEY": "0" * 40,
                "WANDB_MODE": "online", "WANDB_INIT_TIMEOUT": "3"}
        runs = {"first": [[*WANDB, f"run.output_dir={folder}/one", "run.stop_after=3"], {}],
                "second": [[*WANDB, f"run.output_dir={folder}/one"], {}],
                "fresh": [[*WANDB, f"run.output_dir={folder}/other"], {}],
                "down": [[*WANDB, f"run.output_dir={folder}/down"], down]}
        return folder, spawn("dist.bodies_resume:tracked", world_size=2, args={"runs": runs}, folder=folder,
                             timeout_s=120)


def test_b63_one_run_folder_from_rank_0(results):
    folder, by_rank = results
    assert len(list((folder / "other" / "wandb").glob("offline-run-*"))) == 1
    assert by_rank[1] == {}  # the other rank has no metrics at all


def test_b66_the_id_survives_a_resume_and_a_fresh_run_has_its_own(results):
    _, (main, _) = results
    assert main["first"]["id"] and main["first"]["id"] == main["second"]["id"] != main["fresh"]["id"]
    assert main["first"]["lines"] == 3 and main["second"]["lines"] == 5


def test_b65_no_network_no_harm(results):
    folder, (main, _) = results
    assert main["down"]["lines"] == 5
    assert len(list((folder / "down" / "wandb").glob("offline-run-*"))) == 1  # it went on offline
