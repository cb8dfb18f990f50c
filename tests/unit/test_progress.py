"""Progress is read from the records of a run, whatever state they are in."""

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from experiments.runs.records import LastRow, RecordWriter
from experiments.tracking import progress
from experiments.tracking.progress import Snapshot, watch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REDRAW_S", 0.01)
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")


def write_steps(run_dir: Path, num_steps: int) -> None:
    with RecordWriter(run_dir / "steps.jsonl") as steps:
        for step in range(num_steps):
            steps.append({"step": step, "loss": 2.0 / (step + 1)})
            time.sleep(0.02)


def test_last_row_follows_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    row = LastRow(path)
    assert row.read() == {}
    path.write_bytes(b'{"step": 0}\n{"st')
    assert row.read() == {"step": 0}
    assert row.read() == {"step": 0}
    with path.open("ab") as file:
        file.write(b'ep": 1}\n')
    assert row.read() == {"step": 1}
    with path.open("ab") as file:
        file.write(b"broken\n")
    assert row.read() == {"step": 1}
    with path.open("ab") as file:
        file.write(b'{"step": 2}\n' * 50_000 + b'{"step": 3}\n')
    assert row.read() == {"step": 3}


def test_lines_for_a_log(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=20)
    with watch(tmp_path, total_steps=4, label="mlp [seed 1]", console=console):
        write_steps(tmp_path, 4)
        (tmp_path / "epochs.jsonl").write_text('{"accuracy": 0.75}\n{"accuracy": null}\n')
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[-1].startswith("mlp [seed 1]: step 4/4, loss 0.5")
    assert len(lines) > 1
    assert "\x1b" not in "".join(lines)


def test_an_accuracy_outlives_epochs_that_did_not_measure_it(tmp_path: Path) -> None:
    reader = progress.RunReader(tmp_path, 4, "mlp")
    (tmp_path / "epochs.jsonl").write_text('{"accuracy": 0.75}\n')
    assert reader.read().measured == "accuracy 0.75"
    with (tmp_path / "epochs.jsonl").open("a") as file:
        file.write('{"accuracy": null}\n')
    assert reader.read().measured == "accuracy 0.75"


def test_a_run_that_records_nothing_is_shown_too(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    with (
        pytest.raises(KeyboardInterrupt),
        watch(tmp_path / "missing", total_steps=4, label="mlp", console=console),
    ):
        raise KeyboardInterrupt
    assert console.file.getvalue().splitlines()[-1] == "mlp: step 0/4"  # type: ignore[attr-defined]


def test_a_bar_for_a_terminal(tmp_path: Path) -> None:
    console = Console(file=Terminal(), force_terminal=True, width=120)
    with watch(tmp_path, total_steps=4, label="mlp [seed 1]", console=console):
        write_steps(tmp_path, 4)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert "mlp [seed 1]" in drawn
    assert "4/4" in drawn
    assert "loss 0.5" in drawn


def test_colours_alone_make_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not progress.is_terminal(Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("snapshot", "line"),
    [
        (Snapshot("a", 0, 9), "a: step 0/9"),
        (Snapshot("a", 3, 9, loss=0.123456, left_s=59.6), "a: step 3/9, loss 0.1235, 1 min 00 s left"),
        (
            Snapshot("a", 3, 9, measured="accuracy 0.5", left_s=1.0, sweep_left_s=7_260.0),
            "a: step 3/9, accuracy 0.5, 1 s left, all runs 2 h 01 min",
        ),
    ],
)
def test_snapshot_line(snapshot: Snapshot, line: str) -> None:
    assert snapshot.line() == line
