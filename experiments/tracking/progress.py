"""Show how far runs are, from the records they write.

The ranks print into files, and what they record is the truth about them, so the process that started them reads the
records and draws. On a terminal this is a bar; elsewhere a plain line now and then, for a log.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from experiments.reports.measures import in_words
from experiments.runs.json_lines import LastRow
from experiments.runs.run_folder import RunFolder

_REDRAW_S = 0.5
_LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class Snapshot:
    """How far a run is.

    Attributes:
        label: What the user calls the run.
        done: Steps finished.
        total: Steps of the run.
        loss: Of the last step, None before the first.
        measured: On the test set in the last epoch that has it, in words, ``accuracy 0.93``; empty before.
        left_s: Seconds to the end of the run, None as long as unknown.
        sweep_left_s: Seconds to the end of all runs, None as long as unknown or for a single run.
    """

    label: str
    done: int
    total: int
    loss: float | None = None
    measured: str = ""
    left_s: float | None = None
    sweep_left_s: float | None = None

    def figures(self) -> str:
        """Return what was measured and what is left, in words."""
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
        total_steps: Steps from the first to the last, those before a resume included.
        label: What to call the run.
        console: Where to draw, usually ``Console(stderr=True)``.
    """
    with _follow(RunReader(run_dir, total_steps, label), console):
        yield


class SweepProgress:
    """Show the progress of runs that follow one another, and what is left of all of them.

    Args:
        total_runs: Runs of the sweep, those to be skipped included.
        console: Where to draw.
    """

    def __init__(self, total_runs: int, console: Console) -> None:
        self._total_runs = total_runs
        self._console = console
        self._num_begun = 0
        self._durations: list[float] = []

    def skip(self) -> None:
        """Count a run that was finished before."""
        self._num_begun += 1

    @contextmanager
    def watch(self, run_dir: Path, *, total_steps: int, label: str) -> Iterator[None]:
        """Show the progress of the next run; arguments are those of the function ``watch``."""
        self._num_begun += 1
        place = f"run {self._num_begun} of {self._total_runs}, {label}"
        started = time.monotonic()
        with _follow(RunReader(run_dir, total_steps, place, sweep=self), self._console):
            yield
        self._durations.append(time.monotonic() - started)  # a run that failed tells nothing of how long one takes

    def left_s(self, elapsed_s: float, run_left_s: float | None) -> float | None:
        """Return the seconds left of all runs, None as long as nothing tells.

        Args:
            elapsed_s: Seconds of the run that is under way.
            run_left_s: Seconds left of it, if known.
        """
        known = list(self._durations)
        if run_left_s is not None:
            known.append(elapsed_s + run_left_s)
        if not known:
            return None
        mean = sum(known) / len(known)
        current = max(mean - elapsed_s, 0.0) if run_left_s is None else run_left_s
        return current + mean * max(self._total_runs - self._num_begun, 0)


class RunReader:
    """Turn the records of a run into snapshots; arguments are those of the function ``watch``."""

    def __init__(self, run_dir: Path, total_steps: int, label: str, sweep: SweepProgress | None = None) -> None:
        folder = RunFolder(run_dir)
        self._steps = LastRow(folder.steps_path)
        self._epochs = LastRow(folder.epochs_path)
        self._sweep = sweep
        self._empty = Snapshot(label, done=0, total=total_steps)
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first row was seen, and the steps done by then
        self._measured = ""

    def read(self) -> Snapshot:
        """Return how far the run is now."""
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
            sweep_left_s=self._sweep.left_s(now - self._started, left_s) if self._sweep else None,
        )

    def _left_s(self, now: float, done: int) -> float | None:
        """Return the seconds left at the pace since the first row: the start-up and a resume do not count."""
        if done == 0:
            return None
        self._first = self._first or (now, done)
        since, before = self._first
        if done == before:
            return None
        return (now - since) / (done - before) * max(self._empty.total - done, 0)


@contextmanager
def _follow(reader: RunReader, console: Console) -> Iterator[None]:
    """Draw what ``reader`` reads in a thread, and once more at the end."""
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
    """Print a line as it is, however long."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def is_terminal(console: Console) -> bool:
    """Return whether a bar can be redrawn. Variables such as FORCE_COLOR make rich say so of a file as well."""
    return console.file.isatty() and not console.is_dumb_terminal


def duration(seconds: float) -> str:
    """Return a span of time in words, ``2 h 05 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
