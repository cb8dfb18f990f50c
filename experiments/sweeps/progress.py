"""Show the progress of runs one after another, and the time left for all of them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from experiments.tracking.progress import RunReader, follow


class SweepProgress:
    """Show the progress of one run after another.

    Args:
        total_runs: Runs of the sweep, including those to be skipped.
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
        """Show the progress of the next run; arguments are those of ``experiments.tracking.progress.watch``."""
        self._num_begun += 1
        place = f"run {self._num_begun} of {self._total_runs}, {label}"
        started = time.monotonic()
        with follow(RunReader(run_dir, total_steps, place, sweep_left_s=self.left_s), self._console):
            yield
        self._durations.append(time.monotonic() - started)  # not for a failed run, which may have ended early

    def left_s(self, elapsed_s: float, run_left_s: float | None) -> float | None:
        """Return the seconds left for all runs, None if unknown.

        Args:
            elapsed_s: Seconds since the current run started.
            run_left_s: Seconds left of the current run, None if unknown.
        """
        known = list(self._durations)
        if run_left_s is not None:
            known.append(elapsed_s + run_left_s)
        if not known:
            return None
        mean = sum(known) / len(known)
        current = max(mean - elapsed_s, 0.0) if run_left_s is None else run_left_s
        return current + mean * max(self._total_runs - self._num_begun, 0)
