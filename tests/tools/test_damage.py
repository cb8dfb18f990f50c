"""What is missing never passes for whole: a table of damages to a run's folder, and what each command says to them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.config.schema import to_yaml
from experiments.runs.json_lines import read_records
from experiments.runs.run_folder import RunFolder
from tests.in_process import Called, call
from tests.tools.simulated_runs import Run, configured

WORDS = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=64", "batch_size=4", "epochs=4"]
CHECKPOINTS = ["checkpoint.every_steps=4", "checkpoint.keep=1"]
NUM_STEPS, STOP = 20, 13  # five steps an epoch
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with one that was stopped before step 13, in its third epoch."""
    output = tmp_path_factory.mktemp("unfinished")
    config = configured(output, *WORDS, *CHECKPOINTS)
    run = Run(config, stop=STOP)
    run.folder.config_path.write_text(to_yaml(config))
    return output


@pytest.fixture(scope="module")
def finished(unfinished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with the same one, finished."""
    output = tmp_path_factory.mktemp("finished") / "runs"
    shutil.copytree(unfinished, output)
    assert train(output).code == 0
    return output


def copied(source: Path, tmp_path: Path) -> RunFolder:
    (run,) = shutil.copytree(source, tmp_path / "runs").iterdir()
    return RunFolder(run)


def train(output: Path, *words: str) -> Called:
    common = ["cluster=simulated", "cluster.world_size=3", "density=0.05", f"output={output}"]
    return call(["train", *common, *WORDS, *CHECKPOINTS, *words])


def error_of(called: Called) -> str:
    """The only line that begins with error:, without a traceback."""
    assert "Traceback" not in called.err
    lines = [line for line in called.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, called.err
    return lines[0]


def lines_of(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def flip(line: bytes) -> bytes:
    """Change a digit of the last number before the sum, which leaves the line JSON."""
    at = max(index for index, char in enumerate(line[:-20]) if chr(char).isdigit())
    return line[:at] + (b"1" if line[at : at + 1] != b"1" else b"2") + line[at + 1 :]


# What is done to a file of records, and what is said of it: of steps, then of epochs
DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "deleted": (Path.unlink, "is missing, with {} rows", "is missing, with {} rows"),
    "emptied": (lambda path: path.write_bytes(b""), "ends after 0 rows of {}", "ends after 0 rows of {}"),
    "cut in a row": (
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        "ends after {-1} rows of {}, in the middle of a row",
        "rows? of {}, in the middle of a row",
    ),
    "cut behind a row": (lambda path: lines_of(path, lambda rows: rows[:-1]), "rows of {}", "rows? of {}"),
    "first rows removed": (
        lambda path: lines_of(path, lambda rows: rows[1:]),
        "line 1 has step 1: rows before it are missing",
        "line 1 has epoch 1: rows before it are missing",
    ),
    "changed": (
        lambda path: lines_of(path, lambda rows: [rows[0], flip(rows[1]), *rows[2:]]),
        "line 2 was changed after it was written",
        "line 2 was changed after it was written",
    ),
    "swapped": (
        lambda path: lines_of(path, lambda rows: [rows[1], rows[0], *rows[2:]]),
        "line 1 has step 1: rows before it are missing",
        "line 1 has epoch 1: rows before it are missing",
    ),
    "repeated": (
        lambda path: lines_of(path, lambda rows: [rows[0], *rows]),
        "line 2 has step 0 where 1 belongs: rows were repeated or moved",
        "line 2 has epoch 0 where 1 belongs: rows were repeated or moved",
    ),
    "foreign line": (
        lambda path: lines_of(path, lambda rows: [rows[0], b"hello\n", *rows[1:]]),
        "line 2 is not a record",
        "line 2 is not a record",
    ),
    "row without a sum": (
        lambda path: lines_of(path, lambda rows: [rows[0], b'{"step": 1, "epoch": 1}\n', *rows[1:]]),
        "line 2 has no sum, and the rows before it have",
        "line 2 has no sum, and the rows before it have",
    ),
}
KINDS = {"steps": 1, "epochs": 2}


def expected(damage: str, kind: str, num_rows: int) -> str:
    text = DAMAGES[damage][KINDS[kind]]
    return text.replace("{-1}", str(num_rows - 1)).replace("{}", str(num_rows))


def spoilt(folder: RunFolder, damage: str, kind: str) -> None:
    DAMAGES[damage][0](folder.path / f"{kind}.jsonl")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_does_not_go_on_without_its_records(unfinished: Path, tmp_path: Path, damage: str, kind: str) -> None:
    folder = copied(unfinished, tmp_path)
    spoilt(folder, damage, kind)
    called = train(tmp_path / "runs")
    assert called.code in (1, 2)
    line = error_of(called)
    assert f"{kind}.jsonl" in line
    assert_matches(expected(damage, kind, {"steps": STOP, "epochs": 2}[kind]), line)
    assert not folder.is_done()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_run_that_is_damaged_is_not_already_done(
    finished: Path, tmp_path: Path, damage: str, kind: str
) -> None:
    folder = copied(finished, tmp_path)
    spoilt(folder, damage, kind)
    called = train(tmp_path / "runs")
    assert called.code != 0
    assert "already done" not in called.out
    assert_matches(expected(damage, kind, {"steps": NUM_STEPS, "epochs": 4}[kind]), error_of(called))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_recorded_after_the_checkpoint_may_be_anything(unfinished: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(unfinished, tmp_path)
    with (folder.path / f"{kind}.jsonl").open("ab") as file:
        file.write(b"hello\nwo")
    assert train(tmp_path / "runs").code == 0
    assert [row["step"] for row in read_records(folder.steps_path)] == list(range(NUM_STEPS))
    assert (folder.attempts_path / "1" / f"{kind}.jsonl").read_bytes() == b"hello\nwo"


def test_done_says_how_many_rows_there_are(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    done = json.loads(folder.done_path.read_text())
    assert {kind: extent["rows"] for kind, extent in done["records"].items()} == {"steps": NUM_STEPS, "epochs": 4}
    assert train(tmp_path / "runs").out.startswith("already done")


def test_an_older_checkpoint_is_taken_where_only_later_rows_are_damaged(unfinished: Path, tmp_path: Path) -> None:
    config = configured(tmp_path / "runs", *WORDS, "checkpoint.every_steps=4")
    whole = Run(configured(tmp_path / "whole", *WORDS))
    stopped = Run(config, stop=STOP)
    lines_of(stopped.folder.steps_path, lambda rows: rows[:-1])
    end = Run(config)
    assert end.began_at == 12
    assert end.trainer.resumed_from is not None
    assert "ends after 12 rows of 13" in end.trainer.resumed_from.passed_over[0]
    assert end.digest == whole.digest


def assert_matches(pattern: str, line: str) -> None:
    assert re.search(pattern, line), line
