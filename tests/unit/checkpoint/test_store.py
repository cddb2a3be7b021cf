"""One process's checkpoints: complete or absent, found, refused, rotated, brought back to the last bit."""

from __future__ import annotations

import errno
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import layout, slices, store
from shardwise.checkpoint.pieces import TorchHolder
from shardwise.checkpoint.store import Saver
from shardwise.config.schema import CheckpointConfig
from shardwise.dist import Ranks
from shardwise.errors import CheckpointError, SaveError

ALONE = Ranks(0, 0, 1)
META = {"world_size": 1, "loop": {}}


class Toy:
    """A model, an optimizer that has moved, and what saves them."""

    def __init__(self, root: Path, *, seed: int = 0, keep: int = 2, keep_best: int = 0,
                 background: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
        self.model[0].bias.requires_grad = False
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.1, fused=True)
        self.saver = Saver(root, TorchHolder(self.model, self.optimizer, rank=0, world_size=1), ALONE,
                           CheckpointConfig(keep=keep, keep_best=keep_best, async_save=background))
        self.move()

    def move(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 5)).square().sum().backward()
        self.optimizer.step()

    def save(self, step: int, *, must: bool = True, **meta: Any) -> None:
        self.saver.save(step, META | meta, must=must)

    def everything(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[p] for p in self.optimizer.param_groups[0]["params"]]
        return [*(p.detach().clone() for p in self.model.parameters()),
                *(value.clone() for state in states for value in state.values())]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "shardwise")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_everything_comes_back_to_the_last_bit(tmp_path: Path, background: bool) -> None:
    toy = Toy(tmp_path, background=background)
    toy.save(7, must=not background)
    expected, drawn = toy.everything(), None
    toy.saver.settle(must=True)
    drawn = torch.randn(3)
    other = Toy(tmp_path, seed=1)
    frozen = other.model[0].bias.clone()
    for _ in range(3):
        other.move()
    meta = other.saver.load(tmp_path / "step-00000007", seed=0)
    other.model[0].bias.data.copy_(toy.model[0].bias)  # not trained, so not kept
    assert meta["step"] == 7 and equal(other.everything(), expected) and not torch.equal(frozen, toy.model[0].bias)
    if not background:
        assert torch.equal(torch.randn(3), drawn)
    toy.move(), other.move()  # the optimizer goes on alike: its step count came along
    assert not equal(toy.everything(), expected)


def test_the_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.move()
    toy.save(2)
    other = Toy(tmp_path, seed=0)
    other.saver.load(tmp_path / "step-00000002", seed=0)
    for one in (toy, other):
        torch.manual_seed(5)
        one.move()
    assert equal(toy.everything(), other.everything())


def test_weights_that_were_never_moved(tmp_path: Path) -> None:
    """A checkpoint from before the first step has no optimizer state; loading it makes that state zero."""
    toy = Toy(tmp_path)
    toy.optimizer.state.clear()
    toy.save(0)
    toy.move()
    toy.move()
    toy.saver.load(tmp_path / "step-00000000", seed=0)
    states = [toy.optimizer.state[p] for p in toy.optimizer.param_groups[0]["params"]]
    assert all(not value.any() for state in states for value in state.values())


def test_a_background_save_holds_what_was_true_when_it_was_asked_for(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(tmp_path, background=True)
    gate, real = threading.Event(), slices.write
    monkeypatch.setattr(slices, "write", lambda *a, **k: (gate.wait(20), real(*a, **k))[1])
    toy.save(1, must=False)
    expected = toy.everything()
    assert "step-00000001" not in names(tmp_path)  # and training goes on
    toy.move()
    gate.set()
    toy.save(2, must=False)  # waits for the first
    assert "step-00000001" in names(tmp_path)
    toy.saver.settle(must=True)
    other = Toy(tmp_path, seed=0)
    other.saver.load(tmp_path / "step-00000001", seed=0)
    assert equal(other.everything(), expected)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def full_disk(monkeypatch: pytest.MonkeyPatch, after_bytes: int) -> Callable[[], None]:
    """Every file grows to `after_bytes` and no further; returns what makes room again."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    real = FileSystem.create_stream

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        context = real(self, path, mode)

        class Limited:
            def __enter__(self) -> Any:
                stream = context.__enter__()
                write, written = stream.write, 0

                def limited(data: Any) -> int:
                    nonlocal written
                    room = max(0, after_bytes - written)
                    if len(data) > room:
                        write(bytes(data)[:room])
                        raise OSError(errno.ENOSPC, "No space left on device", str(path))
                    written += len(data)
                    return write(data)

                class Stream:
                    def __getattr__(self, name: str) -> Any:
                        return limited if name == "write" else getattr(stream, name)

                return Stream()

            def __exit__(self, *what: Any) -> Any:
                return context.__exit__(*what)

        return Limited()

    monkeypatch.setattr(FileSystem, "create_stream", create_stream)
    return lambda: monkeypatch.setattr(FileSystem, "create_stream", real)


@pytest.mark.parametrize("background", [False, True])
def test_b37_a_full_disk_is_a_warning_and_then_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture, background: bool) -> None:
    toy = Toy(tmp_path, keep=1, background=background)
    toy.save(1)
    before = toy.everything()
    make_room = full_disk(monkeypatch, after_bytes=100)
    toy.move()
    toy.save(2, must=False)
    toy.saver.settle()
    assert names(tmp_path) == ["step-00000001"]  # the old one is there, the half-written one gives its space back
    assert "No space left on device" in said(caplog) and "training goes on" in said(caplog)
    with pytest.raises(SaveError, match="step-00000003: could not be written.*No space left.*earlier checkpoints"):
        toy.save(3, must=False)
        toy.saver.settle()
    make_room()
    toy.save(4)
    assert toy.saver.failures == 0 and names(tmp_path) == ["step-00000004"]
    toy.saver.load(tmp_path / "step-00000004", seed=0)
    assert not equal(toy.everything(), before)


def test_the_save_before_an_end_must_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(tmp_path)
    full_disk(monkeypatch, after_bytes=100)
    with pytest.raises(SaveError, match="No space left"):
        toy.save(1, must=True)


def test_b37_the_old_one_goes_only_after_the_new_one_is_complete(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(tmp_path, keep=1)
    toy.save(1)
    seen: list[list[str]] = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(names(tmp_path)), real(a, b))[1])
    toy.save(2)
    assert seen == [["step-00000001", "step-00000002.part"]] and names(tmp_path) == ["step-00000002"]


def spoil_nothing(folder: Path) -> None:
    pass


def cut_a_file(folder: Path) -> None:
    file = next((folder / "state").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])


def flip_a_bit(folder: Path) -> None:
    file = next((folder / "state").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def lose_a_file(folder: Path) -> None:
    (folder / "rng-00000.pt").unlink()


def cut_the_meta(folder: Path) -> None:
    (folder / "meta.json").write_text((folder / "meta.json").read_text()[:40])


def empty_the_meta(folder: Path) -> None:
    (folder / "meta.json").write_text("{}")


SPOILS = [cut_a_file, flip_a_bit, lose_a_file, cut_the_meta, empty_the_meta]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_broken_one_is_named_and_the_one_before_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                          spoil: Callable[[Path], None]) -> None:
    toy = Toy(tmp_path)
    toy.save(1)
    toy.save(2)
    assert store.find(tmp_path, ALONE) == tmp_path / "step-00000002" and said(caplog) == ""
    spoil(tmp_path / "step-00000002")
    assert store.find(tmp_path, ALONE) == tmp_path / "step-00000001"
    assert "step-00000002 is broken and left aside" in said(caplog)
    spoil(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="every checkpoint in .* is broken"):
        store.find(tmp_path, ALONE)


def test_b34_whatever_lies_in_the_folder(tmp_path: Path) -> None:
    assert store.find(tmp_path / "none", ALONE) is None
    toy = Toy(tmp_path, keep=10)
    for step in (2, 10, 100):
        toy.save(step)
    (tmp_path / "step-00001000.part").mkdir()
    (tmp_path / "step-00000999").write_text("a file")
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-00002000").mkdir()  # no meta.json
    (tmp_path / "checkpoint-300").mkdir()
    assert store.find(tmp_path, ALONE) == tmp_path / "step-00000100"
    assert [layout.step_of(path) for path in layout.complete(tmp_path)] == [2, 10, 100]


def test_the_best_are_kept_besides_the_newest(tmp_path: Path) -> None:
    toy = Toy(tmp_path, keep=1, keep_best=2)
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 1.0), (6, 9.0)):
        toy.save(step, eval_loss=loss)
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert [layout.step_of(path) for path in layout.best(tmp_path)] == [2, 5, 6]


class Malicious:
    def __reduce__(self) -> Any:
        return Path.touch, (Path(os.environ["PLANTED"]),)


def test_a_planted_pickle_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with checksums that fit: whoever can write the folder can write those too."""
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    toy = Toy(tmp_path)
    toy.save(1)
    folder = tmp_path / "step-00000001"
    planted = pickle.dumps(Malicious())
    (folder / "rng-00000.pt").write_bytes(planted)
    for name in (".metadata", "optimizer.pt", "state/.metadata", "state/mp_rank_00_model_states.pt"):
        (folder / name).write_bytes(planted)  # what torch and DeepSpeed would unpickle
    meta = json.loads((folder / "meta.json").read_text())
    meta["files"]["rng-00000.pt"] = layout.checksum(folder / "rng-00000.pt")
    (folder / "meta.json").write_text(json.dumps(meta))
    assert store.find(tmp_path, ALONE) == folder
    with pytest.raises(CheckpointError, match="not the state of random generators"):
        toy.saver.load(folder, seed=0)
    torch.save(Malicious(), folder / "rng-00000.pt")
    with pytest.raises(CheckpointError, match="not the state of random generators"):
        toy.saver.load(folder, seed=0)
    assert not (tmp_path / "planted").exists()
    pickle.loads(planted)  # it would have
    assert (tmp_path / "planted").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.save(1)
    other = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(other.parameters())
    saver = Saver(tmp_path, TorchHolder(other, optimizer, rank=0, world_size=1), ALONE,
                  CheckpointConfig(keep=1))
    with pytest.raises(CheckpointError, match="not the weights of this model: 0.bias has no elements there, 3 here"):
        saver.load(tmp_path / "step-00000001", seed=0)


def test_an_older_format_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps({"step": 1, "files": {}}))
    with pytest.raises(CheckpointError, match="checkpoint format None, this version reads 2"):
        layout.read_meta(folder)
