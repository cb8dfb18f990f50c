"""Records survive crashes, full disks and two processes that want the same folder."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.harness.errors import UserError
from experiments.harness.records import RecordError, RecordWriter, RunFolder, read_records, write_atomic, write_json

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


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


def test_nan_and_infinity_become_null(file: Path) -> None:
    with RecordWriter(file) as writer:
        writer.append({"loss": math.nan, "parts": [math.inf, 1.0], "of": {"x": (-math.inf, "NaN")}})
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == read_records(file)[0]
    assert read_records(file) == [{"loss": None, "parts": [None, 1.0], "of": {"x": [None, "NaN"]}}]


def test_pandas_reads_null_as_nan(file: Path) -> None:
    pandas = pytest.importorskip("pandas")
    with RecordWriter(file) as writer:
        writer.append({"loss": 1.0})
        writer.append({"loss": math.nan})
    loss = pandas.DataFrame(read_records(file))["loss"]
    assert loss.dtype == "float64"
    assert math.isnan(loss[1])


def test_a_value_that_is_not_plain_is_refused(file: Path) -> None:
    with RecordWriter(file) as writer, pytest.raises(TypeError):
        writer.append({"loss": object()})
    assert file.read_bytes() == b""


@pytest.mark.parametrize("torn", [b'{"st', b'{"step": 2}', b'{"long": "' + b"x" * 200_000])
def test_a_torn_row_is_skipped_and_cut_off(file: Path, torn: bytes) -> None:
    file.write_bytes(b'{"step": 0}\n{"step": 1}\n' + torn)
    assert read_records(file) == [{"step": 0}, {"step": 1}]
    with RecordWriter(file) as writer:
        writer.append({"step": 2})
    assert file.read_bytes() == b'{"step": 0}\n{"step": 1}\n{"step": 2}\n'


def test_a_file_of_one_torn_row_starts_again(file: Path) -> None:
    file.write_bytes(b'{"step')
    RecordWriter(file).close()
    assert file.read_bytes() == b""


@pytest.mark.parametrize("line", ["{", "3", "", '{"step": 1} {"step": 2}'])
def test_a_corrupt_line_is_named(file: Path, line: str) -> None:
    file.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(RecordError, match=r"steps.jsonl, line 2 is not a record"):
        read_records(file)


def test_records_that_are_missing_are_named(file: Path) -> None:
    with pytest.raises(RecordError, match=r"^cannot read records: .*steps.jsonl: no such file or directory$"):
        read_records(file)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_one_line() -> None:
    with RecordWriter(Path("/dev/full")) as writer, pytest.raises(RecordError) as caught:
        writer.append({"step": 0})
    message = "cannot write /dev/full: no space left on device; free space and start the run again"
    assert str(caught.value) == message


def test_a_row_that_fits_in_part_is_taken_back(file: Path) -> None:
    """A limit on the size of files stands in for a disk with room for half a row."""
    program = """
import resource, signal, sys
from pathlib import Path
from experiments.harness.records import RecordError, RecordWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = RecordWriter(Path(sys.argv[1]))
writer.append({"step": 0})
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
try:
    writer.append({"step": 1, "long": "x" * 100})
except RecordError as error:
    sys.exit(f"{error}")
"""
    command = [sys.executable, "-c", program, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stderr == f"cannot write {file}: no space left on device; free space and start the run again\n"
    assert file.read_text() == '{"step": 0}\n'


def test_a_writer_without_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"^cannot write .*steps.jsonl: no such file or directory; choose a folder"):
        RecordWriter(tmp_path / "missing" / "steps.jsonl")


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


def test_an_atomic_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_atomic(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_done_is_the_last_word(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert not run.is_done()
    run.mark_done({"accuracy": 0.5, "wall_s": 3.0})
    assert run.is_done()
    assert json.loads(run.done_path.read_text()) == {"accuracy": 0.5, "wall_s": 3.0}


def test_only_one_process_owns_a_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a" / "b")
    program = """
import sys
from pathlib import Path
from experiments.harness.records import RunFolder
with RunFolder(Path(sys.argv[1])).claim():
    print("mine", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(run.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        with pytest.raises(UserError) as caught, run.claim():
            pytest.fail("two owners")
        message = f"run folder {run.path} is in use by another process; wait for it, or choose another folder"
        assert str(caught.value) == message
        owner.kill()  # a killed owner owns nothing
    with run.claim() as earlier:
        assert earlier is None


def test_two_claims_of_one_process_collide_too(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.claim(), pytest.raises(UserError, match="in use by another process"), run.claim():
        pytest.fail("two owners")
    with run.claim():
        pass


def test_what_an_attempt_recorded_is_kept_apart(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name in ("steps.jsonl", "epochs.jsonl", "failure.json", "manifest.json", "config.yaml"):
        (tmp_path / name).write_text(name)
    for name in ("ranks/rank0", "errors", "figures", "checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    with run.claim() as earlier:
        assert earlier == tmp_path / "attempts" / "1"
        run.steps_path.write_text("second")
    with run.claim() as earlier:
        assert earlier == tmp_path / "attempts" / "2"
    with run.claim() as earlier:
        assert earlier is None
    kept = sorted(path.name for path in (tmp_path / "attempts" / "1").iterdir())
    assert kept == ["epochs.jsonl", "errors", "failure.json", "manifest.json", "ranks", "steps.jsonl"]
    assert (tmp_path / "attempts/1/steps.jsonl").read_text() == "steps.jsonl"
    assert (tmp_path / "attempts/2/steps.jsonl").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "attempts",
        "checkpoints",
        "config.yaml",
        "figures",
    ]


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.steps_path.write_text('{"step": 0}\n')
    run.mark_done({})
    with run.claim() as earlier:
        assert earlier is None
    assert run.steps_path.exists()


@pytest.mark.parametrize("name", ["file/runs/one", f"new/{'x' * 300}", f"new/deeper/{'x' * 300}/one"])
def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    message = r"^cannot use run folder .*; choose a folder that can be written$"
    with pytest.raises(UserError, match=message) as caught, RunFolder(tmp_path / name).claim():
        pytest.fail("claimed")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["file"]
