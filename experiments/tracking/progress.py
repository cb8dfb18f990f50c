"""Show the progress of a run from its records.

The output of ranks goes into files, so the process that started them reads their records and shows the progress: a bar
on a terminal, a plain line at intervals elsewhere.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from experiments.reports.measures import in_words
from experiments.runs.records import LastRow
from experiments.runs.run_folder import RunFolder

_REDRAW_S = 0.5
_LINE_EVERY_S = 10.0

SweepLeft = Callable[[float, float | None], float | None]


@dataclass(frozen=True)
class Snapshot:
    """The progress of a run at one moment.

    Attributes:
        label: The name of the run for the user.
        done: Steps finished.
        total: Steps of the run.
        loss: Of the last step, None before the first.
        measured: Text of the last measure on the test set, ``accuracy 0.93``; empty before the first.
        left_s: Seconds to the end of the run, None if unknown.
        sweep_left_s: Seconds to the end of all runs, None if unknown or for a single run.
    """

    label: str
    done: int
    total: int
    loss: float | None = None
    measured: str = ""
    left_s: float | None = None
    sweep_left_s: float | None = None

    def figures(self) -> str:
        """Return a text with the measurements and the time left."""
        parts = [
            None if self.loss is None else f"loss {self.loss:.4g}",
            self.measured,
            None if self.left_s is None else f"{duration(self.left_s)} left",
            None if self.sweep_left_s is None else f"all runs {duration(self.sweep_left_s)}",
        ]
        return ", ".join(part for part in parts if part)

    def line(self) -> str:
        """Return the snapshot as one line of a log."""
        figures = self.figures()
        return f"{self.label}: step {self.done}/{self.total}" + (f", {figures}" if figures else "")


@contextmanager
def watch(run_dir: Path, *, total_steps: int, label: str, console: Console) -> Iterator[None]:
    """Show the progress of the run that writes into ``run_dir`` while the context lasts.

    Args:
        run_dir: Folder of the run; its records may not exist yet.
        total_steps: Steps of the whole run, including those before a resume.
        label: The name of the run for the user.
        console: Where to draw, usually ``Console(stderr=True)``.
    """
    with follow(RunReader(run_dir, total_steps, label), console):
        yield


class RunReader:
    """Turn the records of a run into snapshots; arguments are those of the function ``watch``.

    Args:
        sweep_left_s: Returns the seconds left for all runs of a sweep, from the elapsed and the remaining seconds of
            this run.
    """

    def __init__(self, run_dir: Path, total_steps: int, label: str, sweep_left_s: SweepLeft | None = None) -> None:
        folder = RunFolder(run_dir)
        self._steps = LastRow(folder.steps_path)
        self._epochs = LastRow(folder.epochs_path)
        self._sweep_left_s = sweep_left_s
        self._empty = Snapshot(label, done=0, total=total_steps)
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None  # time when a row was first read, and its number of steps
        self._measured = ""

    def read(self) -> Snapshot:
        """Return the current progress of the run."""
        row = self._steps.read()
        now = time.monotonic()
        done = int(row.get("step", -1)) + 1
        self._measured = in_words(self._epochs.read()) or self._measured
        left_s = self._left_s(now, done)
        return replace(
            self._empty,
            done=done,
            loss=row.get("loss"),
            measured=self._measured,
            left_s=left_s,
            sweep_left_s=self._sweep_left_s(now - self._started, left_s) if self._sweep_left_s else None,
        )

    def _left_s(self, now: float, done: int) -> float | None:
        """Return the seconds left at the speed since a row was first read, so without start-up and resume."""
        if done == 0:
            return None
        self._first = self._first or (now, done)
        since, before = self._first
        if done == before:
            return None
        return (now - since) / (done - before) * max(self._empty.total - done, 0)


@contextmanager
def follow(reader: RunReader, console: Console) -> Iterator[None]:
    """Show the snapshots of ``reader`` from a thread while the context lasts, and once more at its end."""
    stop = threading.Event()
    draw, every_s = (_draw_bar, _REDRAW_S) if is_terminal(console) else (_draw_lines, _LINE_EVERY_S)
    thread = threading.Thread(target=draw, args=(reader, console, stop, every_s), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _draw_lines(reader: RunReader, console: Console, stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        print_plain(console, reader.read().line())
    print_plain(console, reader.read().line())


def _draw_bar(reader: RunReader, console: Console, stop: threading.Event, every_s: float) -> None:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        first = reader.read()
        task = bar.add_task(first.label, total=first.total, figures="")
        stopped = False
        while not stopped:
            stopped = stop.wait(every_s)
            snapshot = reader.read()
            bar.update(task, completed=snapshot.done, figures=snapshot.figures(), refresh=True)


def print_plain(console: Console, line: str) -> None:
    """Print a line without markup and without wrapping."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def is_terminal(console: Console) -> bool:
    """Return whether a bar can be redrawn. rich alone would say yes for a file if FORCE_COLOR is set."""
    return console.file.isatty() and not console.is_dumb_terminal


def duration(seconds: float) -> str:
    """Return a duration as text, ``2 h 05 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
