"""A checkpoint is complete or absent: whatever a crash, a full disk or a damaged file does to it."""

import hashlib
import json
import math
import os
import re
import resource
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.config.errors import UserError
from experiments.runs.checkpoint_folder import Checkpoint
from experiments.runs.checkpoint_parts import PartDigest, TornCheckpoint
from experiments.runs.checkpoints import Checkpoints, open_checkpoint
from tests.crashes import Crash, crash_at

WORLD_SIZE = 2


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a loss of power, which no test brings about, nobody sees that data has not reached the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def of(folder: Path, *, run: str = "run-a", world_size: int = WORLD_SIZE, keep: int = 2) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", run=run, world_size=world_size, keep=keep)


def state(step: int, rank: int = 0) -> dict[str, Any]:
    return {"step": step, "rank": rank, "weights": torch.full((5,), float(step))}


def take(checkpoints: Checkpoints, step: int, world_size: int = WORLD_SIZE) -> Checkpoint:
    draft = checkpoints.begin(step)
    parts = [checkpoints.write_part(draft, rank, state(step, rank)) for rank in range(world_size)]
    return checkpoints.publish(draft, step, parts)


def steps(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.candidates()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_whole(checkpoint: Checkpoint) -> None:
    for rank in range(WORLD_SIZE):
        part = Checkpoints.read_part(checkpoint, rank)
        assert (part["step"], part["rank"]) == (checkpoint.step, rank)
        assert torch.equal(part["weights"], state(checkpoint.step)["weights"])


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


# What comes back


ODD = [0.0, -0.0, 1.5, math.nan, math.inf, 1e-45]


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.tensor(ODD, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)),
        *(torch.tensor([0, 1, -(2**62)]), torch.tensor([True, False]), torch.ones(2, 3).T, torch.zeros(0, 4)),
        *(torch.tensor(3.5), torch.nn.Parameter(torch.ones(2))),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, tensor: torch.Tensor) -> None:
    checkpoints = of(tmp_path, world_size=1)
    draft = checkpoints.begin(1)
    parts = [checkpoints.write_part(draft, 0, {"x": tensor})]
    read = checkpoints.read_part(checkpoints.publish(draft, 1, parts), 0)["x"]
    assert (read.dtype, read.shape, type(read)) == (tensor.dtype, tensor.shape, type(tensor))
    assert bits(read) == bits(tensor)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -0.5, 1e300, 2**80, 1j, "naïve\n", b"\x00\xff", (), [], {}, {1, 2}),
        *((1, (2, [3, {"a": (None,)}])), {0: "int key", (1, "b"): "tuple key"}, OrderedDict(b=1, a=2)),
        *(torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1)),
    ],
    ids=repr,
)
def test_plain_values_come_back_with_their_types(tmp_path: Path, value: object) -> None:
    checkpoints = of(tmp_path, world_size=1)
    draft = checkpoints.begin(0)
    parts = [checkpoints.write_part(draft, 0, {"value": value})]
    read = checkpoints.read_part(checkpoints.publish(draft, 0, parts), 0)["value"]
    assert read == value
    assert type(read) is type(value)


def test_the_state_of_a_model_and_of_randomness_comes_back(tmp_path: Path) -> None:
    checkpoints = of(tmp_path, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    draft = checkpoints.begin(1)
    state = {"model": model.state_dict(), "random": torch.get_rng_state()}
    checkpoint = checkpoints.publish(draft, 1, [checkpoints.write_part(draft, 0, state)])
    read = checkpoints.read_part(checkpoint, 0)
    again = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    again.load_state_dict(read["model"])
    assert [bits(tensor) for tensor in again.state_dict().values()] == list(map(bits, model.state_dict().values()))
    assert torch.equal(read["random"], state["random"])


def test_views_of_one_storage_are_written_once(tmp_path: Path) -> None:
    checkpoints = of(tmp_path, world_size=1)
    flat = torch.arange(10_000.0)
    part = checkpoints.write_part(checkpoints.begin(0), 0, {"views": list(flat.split(100))})
    assert part.size < 2 * flat.nbytes


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [1, object()]}, r"state\['x'\]\['a'\]\[1\] is of type object"),
        (torch.Generator(), r"state\['x'\] is of type Generator"),
        (Path("x"), r"state\['x'\] is of type PosixPath"),
        (PartDigest("", 0), r"state\['x'\] is of type PartDigest"),
        ({Path("x"): 1}, r"the key PosixPath\('x'\) of state\['x'\] is of type PosixPath"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, value: object, named: str) -> None:
    checkpoints = of(tmp_path)
    draft = checkpoints.begin(0)
    with pytest.raises(TypeError, match=f"^{named}; a checkpoint holds tensors"):
        checkpoints.write_part(draft, 0, {"x": value})
    assert list(draft.iterdir()) == []


def test_what_a_checkpoint_says_of_itself(tmp_path: Path) -> None:
    checkpoint = take(of(tmp_path), 1234)
    assert checkpoint.path == tmp_path / "checkpoints" / "step-000001234"
    description = json.loads((checkpoint.path / "CHECKPOINT.json").read_text())
    assert {**description, "time": "", "parts": [part["size"] for part in description["parts"]]} == {
        "format": 1,
        "run": "run-a",
        "step": 1234,
        "world_size": 2,
        "parts": [(checkpoint.path / f"rank{rank}.pt").stat().st_size for rank in range(2)],
        "records": None,
        "time": "",
        "torch": torch.__version__,
    }
    assert sorted(path.name for path in checkpoint.path.iterdir()) == ["CHECKPOINT.json", "rank0.pt", "rank1.pt"]


# Which remain


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_remain(tmp_path: Path, keep: int) -> None:
    checkpoints = of(tmp_path, keep=keep)
    assert steps(checkpoints) == []
    for num_taken, step in enumerate((0, 5, 10, 999_999_999, 1_000_000_000), start=1):
        take(checkpoints, step)
        assert len(steps(checkpoints)) == min(keep, num_taken)
        assert steps(checkpoints)[0] == step
    assert steps(checkpoints) == [1_000_000_000, 999_999_999, 10][:keep]
    assert len(names(tmp_path)) == keep
    for checkpoint in checkpoints.candidates():
        assert_whole(checkpoint)


def test_none_to_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^keep must be at least 1, got 0"):
        of(tmp_path, keep=0)


def test_a_step_taken_again_replaces_the_one_before(tmp_path: Path) -> None:
    checkpoints = of(tmp_path)
    first = take(checkpoints, 5)
    (first.path / "rank1.pt").unlink()
    second = take(checkpoints, 5)
    assert_whole(second)
    assert checkpoints.candidates() == [second]
    assert names(tmp_path) == [second.path.name]
    third = take(checkpoints, 5)
    assert checkpoints.candidates() == [third]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_was_taken_back_leaves_its_later_checkpoints(tmp_path: Path, keep: int) -> None:
    """A damaged checkpoint of a later step must not take the place of a whole one."""
    checkpoints = of(tmp_path, keep=2)
    for step in (5, 10):
        take(checkpoints, step)
    (tmp_path / "checkpoints/step-000000010/rank0.pt").write_bytes(b"torn")
    take(of(tmp_path, keep=keep), 7)
    assert steps(checkpoints) == [7, 5][:keep]


def test_later_checkpoints_can_go_at_once(tmp_path: Path) -> None:
    checkpoints = of(tmp_path, keep=3)
    for step in (5, 10, 15):
        take(checkpoints, step)
    checkpoints.remove_after(5)
    assert steps(checkpoints) == [5]


def test_a_finished_run_needs_none(tmp_path: Path) -> None:
    checkpoints = of(tmp_path)
    checkpoints.remove_all()
    take(checkpoints, 5)
    (take(checkpoints, 10).path / "CHECKPOINT.json").write_text("{")
    checkpoints.begin(15)
    checkpoints.remove_all()
    assert list(tmp_path.iterdir()) == []


# Crashes

CHANGES = [(os, "fsync"), (os, "replace"), (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree")]


@pytest.mark.parametrize(("step", "keep"), [(10, 1), (10, 2), (15, 1), (15, 2)])
def test_a_crash_at_any_moment_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, keep: int
) -> None:
    moment, crashed = 0, True
    while crashed:
        folder = tmp_path / str(moment)
        checkpoints = of(folder, keep=keep)
        before = [take(checkpoints, step) for step in (5, 10)][-keep:]
        with crash_at(moment, CHANGES, monkeypatch):
            try:
                take(checkpoints, step)
                crashed = False
            except Crash:
                pass
        restarted = of(folder, keep=keep)
        assert restarted.problems() == []
        found = restarted.candidates()
        for checkpoint in found:
            assert_whole(checkpoint)
        assert found[0].step in (10, step)
        if step not in [checkpoint.step for checkpoint in found]:
            assert found == before[::-1]
        take(restarted, 20)
        assert steps(restarted)[0] == 20
        assert len(names(folder)) == keep  # nothing is left over
        moment += 1
    assert moment > 10


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_what_was_begun_and_not_published_is_no_checkpoint(tmp_path: Path, calls: int) -> None:
    checkpoints = of(tmp_path)
    take(checkpoints, 5)
    draft = checkpoints.begin(10)
    for rank in range(calls - 1):
        checkpoints.write_part(draft, rank, state(10, rank))
    assert steps(of(tmp_path)) == [5]
    assert of(tmp_path).problems() == []
    next_draft = of(tmp_path).begin(10)
    assert list(next_draft.iterdir()) == []
    assert names(tmp_path) == [next_draft.name, "step-000000005"]


def test_removal_that_was_broken_off_leaves_none_that_lacks_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = of(tmp_path)
    taken = [take(checkpoints, step) for step in (5, 10)]
    for moment in range(2):
        with crash_at(moment, CHANGES, monkeypatch), pytest.raises(Crash):
            checkpoints.remove_all()
        assert all(checkpoint in taken for checkpoint in checkpoints.candidates())
        for checkpoint in checkpoints.candidates():
            assert_whole(checkpoint)
    checkpoints.remove_all()
    assert not (tmp_path / "checkpoints").exists()


# Full disks


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_leaves_no_half_part(tmp_path: Path) -> None:
    checkpoints = of(tmp_path)
    take(checkpoints, 5)
    draft = checkpoints.begin(10)
    part = draft / "rank0.pt"
    part.symlink_to("/dev/full")
    with pytest.raises(UserError) as caught:
        checkpoints.write_part(draft, 0, {"x": torch.zeros(100_000)})
    message = rf"cannot write {part}: no space left on device \(.* free, 401 kB needed\); free space and .*"
    assert re.fullmatch(message, str(caught.value))
    assert list(draft.iterdir()) == []
    checkpoints.discard(draft)
    assert names(tmp_path) == ["step-000000005"]
    assert_whole(checkpoints.candidates()[0])


@pytest.mark.parametrize("limit", [0, 1000, 100_000])
def test_a_disk_that_fills_up_within_a_part(tmp_path: Path, limit: int) -> None:
    """A limit on the size of files stands in for the disk."""
    checkpoints = of(tmp_path)
    draft = checkpoints.begin(10)
    first = checkpoints.write_part(draft, 0, state(10))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(UserError, match=r"^cannot write .*rank1.pt: file too large; [^\n]*$"):
            checkpoints.write_part(draft, 1, {"x": [torch.zeros(20_000) for _ in range(3)]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in draft.iterdir()] == ["rank0.pt"]
    assert first.size == (draft / "rank0.pt").stat().st_size
    checkpoints.discard(draft)
    assert names(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    checkpoints = of(tmp_path)
    take(checkpoints, 5)
    draft = checkpoints.begin(10)
    parts = [checkpoints.write_part(draft, rank, state(10, rank)) for rank in range(2)]
    (draft / f".CHECKPOINT.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"^cannot write .*CHECKPOINT.json: no space left .*; free space"):
        checkpoints.publish(draft, 10, parts)
    assert names(tmp_path) == ["step-000000005"]


def test_a_part_that_rank_0_does_not_see_is_named(tmp_path: Path) -> None:
    checkpoints = of(tmp_path)
    draft = checkpoints.begin(10)
    parts = [checkpoints.write_part(draft, rank, state(10, rank)) for rank in range(2)]
    (draft / "rank1.pt").unlink()
    with pytest.raises(
        UserError, match=r"^the part that rank 1 wrote .* put the run's folder on a disk that all nodes"
    ):
        checkpoints.publish(draft, 10, parts)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match=r"^cannot write .*step-000000001: file exists; choose a folder[^\n]*$"):
        of(tmp_path).begin(1)


# Damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (cut, "bytes long where"),
        (flip, "not the bytes that were written"),
        (Path.unlink, "no such file or directory"),
    ],
    ids=["cut short", "one bit", "missing"],
)
def test_a_torn_part_is_told_and_the_checkpoint_before_is_there(
    tmp_path: Path, damage: Callable[[Path], None], reported: str
) -> None:
    checkpoints = of(tmp_path)
    for step in (5, 10):
        take(checkpoints, step)
    newest, before = checkpoints.candidates()
    damage(newest.path / "rank1.pt")
    Checkpoints.read_part(newest, 0)
    with pytest.raises(
        TornCheckpoint, match=rf"^cannot use checkpoint [^\n]*-000000010: rank1.pt: [^\n]*{reported}"
    ) as got:
        Checkpoints.read_part(newest, 1)
    assert isinstance(got.value, UserError)
    assert_whole(before)


def test_a_part_is_verified_before_it_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = take(of(tmp_path), 5)
    flip(checkpoint.path / "rank0.pt")
    monkeypatch.setattr(torch, "load", pytest.fail)
    with pytest.raises(TornCheckpoint):
        Checkpoints.read_part(checkpoint, 0)


def test_a_part_that_torch_cannot_read_is_one_line(tmp_path: Path) -> None:
    checkpoints = of(tmp_path, world_size=1)
    draft = checkpoints.begin(5)
    (draft / "rank0.pt").write_bytes(b"no pickle")
    part = PartDigest(hashlib.sha256(b"no pickle").hexdigest(), 9)
    checkpoint = checkpoints.publish(draft, 5, [part])
    with pytest.raises(TornCheckpoint, match=r"^cannot use checkpoint [^\n]*cannot read it: [^\n]*$"):
        Checkpoints.read_part(checkpoint, 0)


def test_a_part_of_no_rank_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has parts of ranks 0 to 1, none of rank 2$"):
        Checkpoints.read_part(take(of(tmp_path), 5), 2)


def rewrite(**changes: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (Path.unlink, "CHECKPOINT.json: no such file"),
        (cut, "CHECKPOINT.json: not the description of a checkpoint"),
        (lambda path: path.write_text("[]"), "not the description of a checkpoint"),
        (lambda path: path.write_bytes(b"\xff\x00"), "not the description of a checkpoint"),
        (lambda path: path.write_text('{"format": 1}'), "not the description of a checkpoint"),
        (rewrite(parts=[]), "0 parts of 2 ranks"),
        (rewrite(format=2), "is a checkpoint of format 2, and this program reads up to 1"),
        (rewrite(run="run-b"), "belongs to run run-b, not to run-a"),
    ],
)
def test_what_cannot_be_gone_on_from_is_left_out_and_told(
    tmp_path: Path, damage: Callable[[Path], None], reported: str
) -> None:
    checkpoints = of(tmp_path)
    before = take(checkpoints, 5)
    path = take(checkpoints, 10).path
    damage(path / "CHECKPOINT.json")
    assert checkpoints.candidates() == [before]
    [problem] = checkpoints.problems()
    assert reported in problem
    assert str(path) in problem
    assert "\n" not in problem
    take(checkpoints, 10)
    assert steps(checkpoints) == [10, 5]


def test_other_runs_and_other_worlds_are_left_alone(tmp_path: Path) -> None:
    take(of(tmp_path, world_size=3), 7, world_size=3)
    take(of(tmp_path, run="run-b"), 8)
    checkpoints = of(tmp_path, keep=1)
    assert checkpoints.candidates() == []
    world, other = checkpoints.problems()
    assert world.endswith("step-000000007 holds the state of 3 ranks, and this run has 2; it is ignored")
    assert other.endswith("step-000000008 belongs to run run-b, not to run-a; it is ignored")
    for step in (7, 9):
        take(checkpoints, step)
    assert steps(checkpoints) == [9]
    assert steps(of(tmp_path, run="run-b")) == [8]
    checkpoints.remove_all()
    assert names(tmp_path) == ["step-000000007", "step-000000008"]


# Checkpoints of any run


def test_a_checkpoint_is_found_from_its_run_and_by_its_own_folder(tmp_path: Path) -> None:
    checkpoints = of(tmp_path)
    taken = [take(checkpoints, step) for step in (5, 10)]
    assert open_checkpoint(tmp_path) == taken[1]
    assert [open_checkpoint(checkpoint.path) for checkpoint in taken] == taken
    (taken[1].path / "CHECKPOINT.json").write_text("{")
    assert open_checkpoint(tmp_path) == taken[0]
    with pytest.raises(TornCheckpoint, match="not the description of a checkpoint"):
        open_checkpoint(taken[1].path)


def test_no_checkpoint_to_open_is_one_line(tmp_path: Path) -> None:
    wanted = "give the folder of a run, or one of the folders in its checkpoints/"
    with pytest.raises(UserError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == f"no checkpoint in {tmp_path}; {wanted}"
    with pytest.raises(UserError) as caught:
        open_checkpoint(tmp_path / "missing")
    assert str(caught.value) == f"no folder {tmp_path / 'missing'}; {wanted}"
    (take(of(tmp_path), 5).path / "CHECKPOINT.json").write_text("{")
    with pytest.raises(UserError, match="not the description of a checkpoint"):
        open_checkpoint(tmp_path)
