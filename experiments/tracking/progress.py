"""The progress of a run, drawn by rank 0 on the terminal of whoever started it; nothing is drawn without one."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from experiments.launching.process_lifetime import TERMINAL
from experiments.reports.measures import in_words


class Bar:
    """A bar with the number of steps, the last loss and the last measure of the test set."""

    def __init__(self, terminal: TextIO, label: str, done: int, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=_Console(file=terminal, width=_width(terminal)),
        )
        self._task = self._progress.add_task(label, total=total, completed=done, numbers="")
        self._measured = ""
        self._progress.start()

    def show(self, kind: str, row: Mapping[str, Any]) -> None:
        """Show a row of ``steps`` or ``epochs``."""
        self._measured = in_words(row) or self._measured
        if kind == "steps":
            numbers = ", ".join(filter(None, [f"loss {row['loss']:.4g}", self._measured]))
            self._progress.update(self._task, completed=row["step"] + 1, numbers=numbers)
        else:
            self._progress.update(self._task, completed=row["step"])

    def close(self) -> None:
        """Draw it a last time, unless the terminal is gone."""
        with suppress(OSError):
            self._progress.stop()


class _Console(Console):
    """A console whose cursor stays: a rank that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


@contextmanager
def bar(label: str, done: int, total: int) -> Iterator[Bar | None]:
    """Draw the progress of a run while the context lasts; None where there is no terminal to draw on.

    Args:
        label: the name of the run for the user.
        done: steps that were taken before.
        total: steps of the run.
    """
    with _terminal() as terminal:
        if terminal is None:
            yield None
            return
        drawn = Bar(terminal, label, done, total)
        try:
            yield drawn
        finally:
            drawn.close()


@contextmanager
def _terminal() -> Iterator[TextIO | None]:
    """Open the terminal that the launcher names, since a rank's output is a file; else use stderr where it is one."""
    path = os.environ.get(TERMINAL)
    if not path:
        yield sys.stderr if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else None
        return
    try:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "w")
    except OSError:  # it was closed meanwhile
        yield None
        return
    with suppress(OSError), file:
        yield file


def _width(terminal: TextIO) -> int | None:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or None
    except (OSError, ValueError):
        return None
