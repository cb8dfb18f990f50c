"""Records survive crashes and full disks, and are cut back to what is whole; what an attempt leaves is kept apart."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from experiments.config.errors import UserError
from experiments.runs.atomic_files import RecordError, write_atomic, write_json
from experiments.runs.records import DamagedRecord, RecordWriter, read_records
from experiments.runs.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_rows_come_back(file: Path) -> None:
    rows: list[dict[str, object]] = [
        {"step": 0, "loss": 0.1 + 0.2, "name": "a\nb"},
        {"step": 1, "loss": None, "counts": [1, 2]},
    ]
    with RecordWriter(file) as writer:
        for row in rows:
            writer.append(row)
            assert read_records(file)[-1] == row  # at once, not at the end
    assert read_records(file) == rows


def test_nan_and_infinity_become_null_which_pandas_reads_as_nan(file: Path) -> None:
    with RecordWriter(file) as writer:
        writer.append({"loss": 1.0, "parts": [math.inf, 1.0], "of": {"x": (-math.inf, "NaN")}})
        writer.append({"loss": math.nan})
    rows = read_records(file)
    assert rows == [{"loss": 1.0, "parts": [None, 1.0], "of": {"x": [None, "NaN"]}}, {"loss": None}]
    assert math.isnan(pd.DataFrame(rows)["loss"][1])


def test_a_value_that_is_not_plain_is_refused(file: Path) -> None:
    with RecordWriter(file) as writer, pytest.raises(TypeError):
        writer.append({"loss": object()})
    assert file.read_bytes() == b""


@pytest.mark.parametrize("torn", [b"", b'{"st', b'{"step": 2}', b'{"long": "' + b"x" * 200_000])
def test_a_torn_row_is_skipped_and_a_writer_cuts_to_what_it_keeps(file: Path, torn: bytes) -> None:
    with RecordWriter(file) as writer:
        writer.append({"step": 0})
        kept = writer.extent
        writer.append({"step": 1})
    with file.open("ab") as stray:
        stray.write(torn)
        assert read_records(file) == [{"step": 0}, {"step": 1}]
        with RecordWriter(file, kept) as writer:
            stray.write(b"of a process that lost the folder")
            stray.flush()
            writer.append({"step": 2})
            assert writer.extent.rows == 2
            writer.extent.check(file, is_all=True)
    assert file.read_bytes() == b'{"step": 0}\n{"step": 2}\n'


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "is missing, with 2 rows"),
        (lambda path: path.write_bytes(b'{"step": 0}\n{"st'), "some of its 2 rows are gone"),
        (lambda path: path.write_bytes(b'{"step": 0}\n{"step": 3}\n'), "was changed"),
    ],
)
def test_what_is_not_whole_is_not_kept(file: Path, damage: Callable[[Path], object], said: str) -> None:
    with RecordWriter(file) as writer:
        writer.append({"step": 0})
        writer.append({"step": 1})
        kept = writer.extent
    damage(file)
    with pytest.raises(DamagedRecord, match=f"rows.jsonl {said}|rows.jsonl .*{said}") as caught:
        RecordWriter(file, kept)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("line", ["{", "3", "", '{"step": 1} {"step": 2}'])
def test_a_corrupt_line_is_named(file: Path, line: str) -> None:
    with pytest.raises(RecordError, match=r"rows.jsonl: no such file"):
        read_records(file)
    file.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(RecordError, match=r"rows.jsonl, line 2 is not a record"):
        read_records(file)


def test_a_row_that_fits_in_part_is_taken_back(file: Path) -> None:
    """A limit on the size of files stands in for a disk with room for half a row."""
    program = """
import resource, signal, sys
from pathlib import Path
from experiments.runs.atomic_files import RecordError
from experiments.runs.records import RecordWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = RecordWriter(Path(sys.argv[1]))
writer.append({"step": 0})
resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
try:
    writer.append({"step": 1, "long": "x" * 100})
except RecordError as error:
    sys.exit(f"{error}")
"""
    command = [sys.executable, "-c", program, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert re.fullmatch(rf"cannot write {file}: no space left on device .*; free space .*\n", done.stderr)
    assert read_records(file) == [{"step": 0}]


def test_an_atomic_write_replaces_or_leaves(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_atomic(path, "old")
    write_json(path, {"loss": math.nan})
    assert json.loads(path.read_text()) == {"loss": None}
    with pytest.raises(TypeError):
        write_json(path, {"loss": object()})
    (tmp_path / "taken").mkdir()
    with pytest.raises(RecordError, match=r"^cannot write .*taken: is a directory"):
        write_atomic(tmp_path / "taken", "text")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["manifest.json", "taken"]
    assert json.loads(path.read_text()) == {"loss": None}


def test_what_an_attempt_left_is_kept_apart(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name in ("steps.jsonl", "epochs.jsonl", "failure.json", "manifest.json", "config.yaml"):
        (tmp_path / name).write_text(name)
    for name in ("figures", "checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    with run.claim():
        run.steps_path.write_text("second")
    with run.claim():
        pass
    assert names(tmp_path / "attempts/1") == ["epochs.jsonl", "failure.json", "manifest.json", "steps.jsonl"]
    assert (tmp_path / "attempts/1/steps.jsonl").read_text() == "steps.jsonl"
    assert (tmp_path / "attempts/2/steps.jsonl").read_text() == "second"
    assert names(tmp_path) == [".lock", "attempts", "checkpoints", "config.yaml", "figures"]


def test_what_a_killed_process_drafted_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".command.txt.4711.tmp").touch()
    with RunFolder(tmp_path).claim():
        assert not list(tmp_path.rglob("*.tmp"))


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.steps_path.write_text('{"step": 0}\n')
    run.mark_done({"accuracy": 0.5})
    with run.claim():
        assert run.steps_path.exists()
    assert json.loads(run.done_path.read_text()) == {"accuracy": 0.5}


def test_rows_stay_where_the_run_can_go_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for path in (run.steps_path, run.epochs_path, run.manifest_path):
        path.touch()
    (run.checkpoints_path / "step-000000005").mkdir(parents=True)
    with run.claim():
        pass
    assert names(run.attempts_path / "1") == ["manifest.json"]
    assert names(tmp_path) == [".lock", "attempts", "checkpoints", "epochs.jsonl", "steps.jsonl"]


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


@pytest.mark.parametrize("name", ["file/runs/one", "x" * 300])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    message = r"^cannot use run folder .*; choose a folder that can be written$"
    with pytest.raises(UserError, match=message) as caught, RunFolder(tmp_path / name).claim():
        pytest.fail("claimed")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["file"]
