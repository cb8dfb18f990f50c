"""Records survive crashes and full disks, and are cut back to what is whole; what an attempt leaves is kept apart."""

import json
import math
import os
import resource
import signal
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from experiments.runs.files import CannotWrite, Damaged, write_atomic, write_json
from experiments.runs.records import RecordWriter, read_records
from experiments.runs.run_folder import RunFolder
from tests.refusals import refused


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_rows_come_back_at_once_and_what_json_has_not_as_null(file: Path) -> None:
    rows = [{"loss": 0.1 + 0.2, "name": "a\nb"}, {"loss": math.nan, "parts": [math.inf, 1.0], "of": {"x": (math.nan,)}}]
    with closing(RecordWriter(file)) as writer:
        writer.append(rows[0])
        assert read_records(file) == rows[:1]
        writer.append(rows[1])
        with pytest.raises(TypeError):
            writer.append({"loss": object()})
    found = read_records(file)
    assert found == [rows[0], {"loss": None, "parts": [None, 1.0], "of": {"x": [None]}}]
    assert math.isnan(pd.DataFrame(found)["loss"][1])


@pytest.mark.parametrize("torn", [b"", b'{"st', b'{"step": 2}', b'{"long": "' + b"x" * 200_000])
def test_a_torn_row_is_skipped_and_a_writer_cuts_to_what_it_keeps(file: Path, torn: bytes) -> None:
    with closing(RecordWriter(file)) as writer:
        writer.append({"step": 0})
        kept = writer.digest
        writer.append({"step": 1})
    with file.open("ab") as stray:
        stray.write(torn)
        assert read_records(file) == [{"step": 0}, {"step": 1}]
        with closing(RecordWriter(file, kept)) as writer:
            stray.write(b"of a process that lost the folder")
            stray.flush()
            writer.append({"step": 2})
            writer.digest.check(file)
    assert file.read_bytes() == b'{"step": 0}\n{"step": 2}\n'
    file.write_bytes(b'{"step": 3}\n')
    refused(lambda: RecordWriter(file, kept), str(file), error=Damaged)


@pytest.mark.parametrize("line", ["{", "3", "", '{"step": 1} {"step": 2}'])
def test_a_corrupt_line_is_named(file: Path, line: str) -> None:
    refused(lambda: read_records(file), str(file), error=Damaged)
    file.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    refused(lambda: read_records(file), str(file), "line 2", error=Damaged)


def test_a_row_that_fits_in_part_is_taken_back(file: Path) -> None:
    """A limit on the size of files stands in for a disk with room for half a row."""
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(RecordWriter(file)) as writer:
        writer.append({"step": 0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
        try:
            refused(lambda: writer.append({"long": "x" * 100}), str(file), error=CannotWrite)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
    assert file.read_bytes() == b'{"step": 0}\n'


def test_an_atomic_write_replaces_or_leaves(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_atomic(path, "old")
    write_json(path, {"loss": math.nan})
    with pytest.raises(TypeError):
        write_json(path, {"loss": object()})
    (tmp_path / "taken").mkdir()
    refused(lambda: write_atomic(tmp_path / "taken", "text"), "cannot write", tmp_path / "taken")
    assert names(tmp_path) == ["manifest.json", "taken"]
    assert json.loads(path.read_text()) == {"loss": None}


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_what_an_attempt_left_is_kept_apart(tmp_path: Path) -> None:
    run, checkpoint = RunFolder(tmp_path), tmp_path / "checkpoints/step-000000005"
    for name in ("steps.jsonl", "epochs.jsonl", "failure.json", "manifest.json", "config.yaml", ".command.4711.tmp"):
        (tmp_path / name).write_text(name)
    with run.claim():
        run.steps_path.write_text("second")
    checkpoint.mkdir(parents=True)
    with run.claim():
        assert run.steps_path.exists(), "it stays while the run can go on"
    checkpoint.rmdir()
    with run.claim():
        pass
    assert names(tmp_path / "attempts/1") == ["epochs.jsonl", "failure.json", "manifest.json", "steps.jsonl"]
    assert (tmp_path / "attempts/2/steps.jsonl").read_text() == "second"
    assert names(tmp_path) == [".lock", "attempts", "checkpoints", "config.yaml"]


@pytest.mark.parametrize("name", ["file/runs/one", "x" * 300])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    refused(lambda: RunFolder(tmp_path / name).claim().__enter__(), "cannot write", tmp_path)
    assert names(tmp_path) == ["file"]
