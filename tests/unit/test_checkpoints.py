"""A checkpoint is complete or absent: whatever a crash, a full disk or a damaged file does to it."""

import json
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.config.errors import UserError
from experiments.runs.checkpoints import (
    Checkpoint,
    DamagedCheckpoint,
    begin,
    discard,
    open_checkpoint,
    publish,
    remove_after,
    remove_all,
    usable,
)
from experiments.runs.rank_files import read_rank, write_rank
from experiments.runs.records import RecordWriter
from experiments.runs.run_folder import RunFolder

WORLD_SIZE = 2


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a loss of power, which no test brings about, nobody sees that data has not reached the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def state(step: int, rank: int = 0) -> dict[str, Any]:
    return {"step": step, "rank": rank, "weights": torch.full((5,), float(step))}


def take(run: RunFolder, step: int, *, keep: int = 2) -> Checkpoint:
    draft = begin(run, step)
    ranks = [write_rank(draft, rank, state(step, rank)) for rank in range(WORLD_SIZE)]
    return publish(run, draft, step, ranks, {}, keep=keep)


def steps(run: RunFolder) -> list[int]:
    return [checkpoint.step for checkpoint in usable(run)[0]]


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints_path.iterdir())


def test_a_state_comes_back_bit_for_bit(run: RunFolder) -> None:
    odd = torch.tensor([0.0, -0.0, math.nan, math.inf, 1e-45])
    flat = torch.arange(10_000.0)
    saved: dict[str, Any] = {
        "tensors": [odd, odd.bfloat16(), torch.tensor([2**62]), torch.ones(2, 3).T, torch.zeros(0, 4)],
        "plain": {0: (None, True, -0.5, 2**80, "naïve\n", b"\x00", {1, 2})},
        "random": torch.get_rng_state(),
        "views": list(flat.split(100)),
    }
    draft = begin(run, 7)
    checkpoint = publish(run, draft, 7, [write_rank(draft, 0, saved)], {})
    assert checkpoint.ranks[0].bytes < 2 * flat.nbytes, "views of one storage are written once"
    read = read_rank(checkpoint, 0)
    assert read["plain"] == saved["plain"]
    for name in ("tensors", "views"):
        for one, other in zip(read[name], saved[name], strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.contiguous().view(torch.uint8).tolist() == other.contiguous().view(torch.uint8).tolist()
    assert torch.equal(read["random"], saved["random"])
    assert usable(run) == ([checkpoint], [])


def test_what_could_not_be_read_back_is_refused_when_it_is_written(run: RunFolder) -> None:
    with pytest.raises(TypeError, match="pathlib"):
        write_rank(begin(run, 0), 0, {"x": Path("x")})


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_remain_and_later_ones_can_go(run: RunFolder, keep: int) -> None:
    for step in (5, 10, 15):
        take(run, step, keep=keep)
    assert steps(run) == [15, 10][:keep]
    assert len(names(run)) == keep
    remove_after(run, 10)
    assert steps(run) == [10][: keep - 1]
    begin(run, 20)
    remove_all(run)
    assert not run.checkpoints_path.exists()


def test_a_checkpoint_holds_what_was_recorded_until_then(run: RunFolder) -> None:
    with RecordWriter(run.steps_path) as writer:
        for step in (1, 2):
            writer.append({"step": step})
            draft = begin(run, step)
            publish(run, draft, step, [write_rank(draft, 0, {})], {"steps.jsonl": writer.extent})
    assert steps(run) == [2, 1]
    run.steps_path.write_bytes(run.steps_path.read_bytes()[:-2])
    found, (problem,) = usable(run)
    assert [checkpoint.step for checkpoint in found] == [1]
    assert "steps.jsonl" in problem


@pytest.mark.parametrize("limit", [0, 1000, 100_000])
def test_a_disk_that_fills_up_leaves_no_half_file(run: RunFolder, limit: int) -> None:
    """A limit on the size of files stands in for the disk."""
    draft = begin(run, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(UserError, match=r"^cannot write .*rank1.pt: file too large; [^\n]*$"):
            write_rank(draft, 1, {"x": [torch.zeros(20_000) for _ in range(3)]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(draft.iterdir()) == []
    discard(draft)
    assert names(run) == []


def test_a_file_that_rank_0_does_not_see_is_named(run: RunFolder) -> None:
    draft = begin(run, 10)
    ranks = [write_rank(draft, rank, state(10, rank)) for rank in range(WORLD_SIZE)]
    (draft / "rank1.pt").unlink()
    with pytest.raises(UserError, match=r"rank 1 wrote .* put the run's folder on a disk that all nodes"):
        publish(run, draft, 10, ranks, {})


# Damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=["cut short", "one bit", "missing"])
def test_a_damaged_file_is_told_before_it_is_unpickled(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    before, newest = take(run, 5), take(run, 10)
    damage(newest.path / "rank1.pt")
    read_rank(newest, 0)
    monkeypatch.setattr(torch, "load", pytest.fail)
    with pytest.raises(DamagedCheckpoint) as caught:
        read_rank(newest, 1)
    monkeypatch.undo()
    assert f"{newest.path}: rank1.pt: " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert torch.equal(read_rank(before, 1)["weights"], state(5)["weights"])
    assert damage is flip or steps(run) == [5]


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        cut,
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "ranks": [{"bytes": 3}]})),
    ],
)
def test_a_description_that_is_not_whole_is_told(run: RunFolder, damage: Callable[[Path], None]) -> None:
    before, newest = take(run, 5), take(run, 10)
    damage(newest.path / "CHECKPOINT.json")
    found, (problem,) = usable(run)
    assert found == [before]
    assert str(newest.path) in problem
    assert "\n" not in problem


def test_a_checkpoint_of_any_run_is_found_from_its_run_and_by_its_own_folder(run: RunFolder) -> None:
    taken = [take(run, step) for step in (5, 10)]
    assert open_checkpoint(run.path) == taken[1]
    assert [open_checkpoint(checkpoint.path) for checkpoint in taken] == taken
    (taken[1].path / "CHECKPOINT.json").write_text("{")
    assert open_checkpoint(run.path) == taken[0]
    with pytest.raises(DamagedCheckpoint):
        open_checkpoint(taken[1].path)
    remove_all(run)
    for path in (run.path, run.path / "missing"):
        with pytest.raises(UserError, match=r"give the folder of a run, or one of the folders in its checkpoints/$"):
            open_checkpoint(path)
