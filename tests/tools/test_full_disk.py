"""Disks that fill up or fail during a run: one line with the cause, and the same command continues."""

import errno
import os
from pathlib import Path

import pytest

from experiments import sweep
from experiments.runs.records import read_records
from tests.dist.rank_functions import called, train
from tests.finished_runs import only_run, weights_of, write_study
from tests.small_disks import MemoryDisk, mounted
from tests.tools.simulated_runs import struck

WORDS = [
    *("model=mlp", "dataset=synthetic", "dataset.settings.num_samples=256", "batch_size=8", "epochs=3"),
    *("cluster=simulated", "cluster.world_size=2", "density=0.05", "checkpoint.every_s=0"),
]
NUM_STEPS = 48


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights that a run on a large disk ends with."""
    output = tmp_path_factory.mktemp("whole")
    assert train(*WORDS, f"output={output}").returncode == 0
    return weights_of(output)


def fails(output: Path, *words: str) -> str:
    """Return the one line that a run prints, which fails."""
    ended = train(*WORDS, *words, f"output={output}")
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: mlp-synthetic-micro-")
    return line


def goes_on(output: Path, whole: str, *words: str) -> bool:
    """Give the same command again, which ends with the weights of the whole run; return whether it resumed."""
    ended = train(*WORDS, *words, f"output={output}")
    assert ended.returncode == 0, ended.stderr
    assert weights_of(output) == whole
    assert [row["step"] for row in read_records(only_run(output) / "steps.jsonl")] == list(range(NUM_STEPS))
    return "resumed from step " in ended.stderr


@pytest.mark.parametrize(
    ("step", "leaving", "words", "file"),
    [
        (2, 0, [], "steps.jsonl"),
        (15, 0, [], "epochs.jsonl"),
        (18, 8192, [], "checkpoints/.draft-"),
        (47, 16384, ["save_weights=true", "checkpoint.every_steps=0"], "weights.pt"),
    ],
)
def test_a_disk_that_fills_up(tmp_path: Path, whole: str, step: int, leaving: int, words: list[str], file: str) -> None:
    with mounted(MemoryDisk(tmp_path / "disk", "1m")) as disk:
        output, words = disk.path / "runs", ["checkpoint.every_steps=10", *words]
        with struck(step, lambda: disk.fill(leaving=leaving)):
            line = fails(output, *words)
        assert f"cannot write {only_run(output) / file}" in line
        assert "no space left on device (" in line
        disk.free()
        assert goes_on(output, whole, *words) == (10 < step < 47)


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    with mounted(MemoryDisk(tmp_path / "disk", "64k")) as disk:
        disk.fill()
        ended = train(*WORDS, f"output={disk.path / 'runs'}")
        assert ended.returncode == 2
        assert f"cannot write into {disk.path / 'runs'}: no space left on device (0 bytes" in ended.stderr
        disk.free()
        disk.fill(leaving=8192)  # enough for the trial, not for the run
        assert "no space left on device (" in fails(disk.path / "runs")


@pytest.mark.parametrize(("call", "number"), [("write", errno.EDQUOT), ("write", errno.EROFS), ("fsync", errno.EIO)])
def test_other_errors_of_a_disk(
    tmp_path: Path, whole: str, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """``write`` fails for a row of records, ``fsync`` when a checkpoint is saved."""
    real = getattr(os, call)

    def broken(descriptor: int, *arguments: bytes) -> int:
        if "/runs/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        return int(real(descriptor, *arguments) or 0)

    with monkeypatch.context() as patch, struck(15, lambda: patch.setattr(os, call, broken)):
        line = fails(tmp_path / "runs", "checkpoint.every_steps=10")
    assert f"/steps.jsonl: {os.strerror(number).lower()}" in line
    assert goes_on(tmp_path / "runs", whole, "checkpoint.every_steps=10")


def test_a_sweep_reports_a_full_disk_and_continues_when_there_is_room(tmp_path: Path) -> None:
    with mounted(MemoryDisk(tmp_path / "disk", "1m")) as disk:
        path = write_study(tmp_path, [*WORDS, f"output={disk.path / 'runs'}"], {"seed": [0]})
        disk.fill(leaving=20_480)
        full = called(sweep.main, path, "--jobs", "1")
        assert full.returncode == 1
        failed = [line for line in full.stdout.splitlines() if line.startswith("failed: ")]
        assert failed
        assert all("no space left on device" in line for line in failed)
        disk.free()
        assert called(sweep.main, path, "--jobs", "1").returncode == 0
