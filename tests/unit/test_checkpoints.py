"""A checkpoint is complete or absent: whatever a crash, a full disk or a damaged file does to it."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.config.errors import UserError
from experiments.runs.checkpoints import (
    Checkpoint,
    begin,
    open_checkpoint,
    publish,
    remove_after,
    remove_leftovers,
    usable,
)
from experiments.runs.files import Damaged
from experiments.runs.rank_files import read_rank, write_rank
from experiments.runs.records import RecordWriter
from experiments.runs.run_folder import RunFolder
from tests.refusals import refused


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run's folder on a quick disk: no test brings about a loss of power, in which flushing would matter."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return RunFolder(tmp_path)


def take(run: RunFolder, step: int, *, keep: int = 2, state: Any = None) -> Checkpoint:
    draft = begin(run)
    ranks = [write_rank(draft, rank, state or {"weights": torch.full((5,), float(step))}) for rank in range(2)]
    return publish(run, draft, step, ranks, {}, epoch=0, keep=keep)


def steps(run: RunFolder) -> list[int]:
    return [checkpoint.step for checkpoint in usable(run)[0]]


def test_a_state_comes_back_bit_for_bit_and_what_would_not_is_refused(run: RunFolder) -> None:
    odd, flat = torch.tensor([0.0, -0.0, math.nan, math.inf, 1e-45]), torch.arange(10_000.0)
    tensors = [odd, odd.bfloat16(), torch.tensor([2**62]), torch.ones(2, 3).T, torch.zeros(0, 4), *flat.split(100)]
    plain = {0: (None, True, -0.5, 2**80, "naïve\n", b"\x00", {1, 2})}
    checkpoint = take(run, 7, state={"tensors": tensors, "plain": plain})
    assert checkpoint.ranks[0].bytes < 2 * flat.nbytes, "views of one storage are written once"
    read = read_rank(checkpoint, 0)
    assert read["plain"] == plain
    for one, other in zip(read["tensors"], tensors, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.contiguous().view(torch.uint8).tolist() == other.contiguous().view(torch.uint8).tolist()
    assert usable(run) == ([checkpoint], [])
    refused(lambda: write_rank(begin(run), 0, {"x": Path("x")}), "pathlib", error=TypeError)


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_remain_and_later_ones_can_go(run: RunFolder, keep: int) -> None:
    for step in (5, 10, 15):
        take(run, step, keep=keep)
    assert steps(run) == [15, 10][:keep]
    begin(run)  # what a crash left
    remove_after(run, 10)
    assert len(os.listdir(run.checkpoints_path)) == keep - 1
    run.done_path.write_text('{"step": 5}')
    remove_leftovers(run)
    assert not run.checkpoints_path.exists()
    take(run, 5)
    begin(run)
    remove_leftovers(run)
    assert steps(run) == [5]  # that of the end


def test_a_checkpoint_whose_rows_are_gone_is_not_used(run: RunFolder) -> None:
    writer = RecordWriter(run.steps_path)
    for step in (1, 2):
        writer.append({"step": step})
        publish(run, begin(run), step, [], {"steps.jsonl": writer.digest}, epoch=0)
    writer.close()
    assert steps(run) == [2, 1]
    cut(run.steps_path)
    assert steps(run) == [1]
    assert "steps.jsonl" in usable(run)[1][0]


def test_a_file_that_rank_0_does_not_see_is_named(run: RunFolder) -> None:
    draft = begin(run)
    ranks = [write_rank(draft, rank, {}) for rank in range(2)]
    (draft / "rank1.pt").unlink()
    refused(lambda: publish(run, draft, 10, ranks, {}, epoch=0), "rank 1", "on a disk that all nodes share")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_damaged_file_is_an_error_before_it_is_unpickled(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    before, newest = take(run, 5), take(run, 10)
    damage(newest.rank_path(1))
    read_rank(newest, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", pytest.fail)
        refused(lambda: read_rank(newest, 1), f"{newest.path}/rank1.pt", error=Damaged)
    assert torch.equal(read_rank(before, 1)["weights"], torch.full((5,), 5.0))
    assert steps(run) == [5]


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_where_a_description_is_not_whole_the_checkpoint_before_is_found(
    run: RunFolder, damage: Callable[[Path], None]
) -> None:
    before, newest = take(run, 5), take(run, 10)
    assert [open_checkpoint(path) for path in (run.path, before.path, newest.path)] == [newest, before, newest]
    damage(newest.path / "CHECKPOINT.json")
    found, (problem,) = usable(run)
    assert found == [open_checkpoint(run.path)] == [before]
    assert str(newest.path) in problem
    refused(lambda: open_checkpoint(newest.path), str(newest.path), error=UserError)
    refused(lambda: open_checkpoint(run.path / "missing"), "give the folder of a run", run.path / "missing")
