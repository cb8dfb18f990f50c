"""Show the progress of a sweep's runs when several run at the same time."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from experiments.tracking.progress import RunReader, Snapshot, duration, is_terminal, print_plain

_REDRAW_S = 0.5
_LINES_EVERY_S = 10.0


@dataclass
class _RunningRun:
    """A run that has started and not ended."""

    reader: RunReader
    snapshot: Snapshot
    started: float

    def refresh(self) -> None:
        self.snapshot = self.reader.read()


class LiveTable:
    """One line per running run and one of totals: a table on a terminal, plain lines at intervals elsewhere.

    Args:
        console: Where to draw.
        total: Runs of the sweep.
        done: Runs that were finished before.
        num_at_once: Number of runs at the same time.
    """

    def __init__(self, console: Console, *, total: int, done: int, num_at_once: int) -> None:
        self._console = console
        self._total, self._num_at_once = total, num_at_once
        self._num_done, self._num_failed = done, 0
        self._running: dict[str, _RunningRun] = {}
        self._durations: list[float] = []
        self._drawn = time.monotonic()
        self._live: Live | None = None
        self._owned = ExitStack()

    def begin(self, name: str, run_dir: Path, *, total_steps: int) -> None:
        """Add a run; its records may not exist yet."""
        empty = Snapshot(name, done=0, total=total_steps)
        self._running[name] = _RunningRun(RunReader(run_dir, total_steps, name), empty, time.monotonic())

    def done(self, name: str) -> None:
        """Remove a finished run from the table."""
        run = self._running.pop(name)
        run.refresh()
        self._num_done += 1
        self._durations.append(time.monotonic() - run.started)
        self.say(f"done: {run.snapshot.line()}")

    def done_elsewhere(self, name: str) -> None:
        """Count a run that another process finished."""
        self._num_done += 1
        self.say(f"done by another process: {name}")

    def failed(self, name: str, why: str) -> None:
        """Remove a failed run from the table."""
        del self._running[name]
        self._num_failed += 1
        self.say(f"failed: {name}: {why}")

    def stopped(self, name: str) -> None:
        """Remove a run that a signal stopped from the table; it counts as waiting again."""
        self.put_back(name)
        self.say(f"stopped: {name}")

    def put_back(self, name: str) -> None:
        """Remove a run that could not start from the table; it counts as waiting again."""
        del self._running[name]

    def say(self, line: str) -> None:
        """Print a line above the table."""
        print_plain(self._console, line)

    def draw(self) -> None:
        """Redraw the table if the interval has passed."""
        every_s = _REDRAW_S if self._live else _LINES_EVERY_S
        if time.monotonic() - self._drawn < every_s:
            return
        self._drawn = time.monotonic()
        for run in self._running.values():
            run.refresh()
        if self._live:
            self._live.update(self._table(), refresh=True)
            return
        for run in self._running.values():
            self.say(run.snapshot.line())
        self.say(self.totals())

    def totals(self) -> str:
        """Return a line with the numbers of runs in each state and the time left."""
        waiting = self._total - self._num_done - self._num_failed - len(self._running)
        left_s = self._left_s(waiting)
        counts = {"done": self._num_done, "failed": self._num_failed, "running": len(self._running), "waiting": waiting}
        words = [f"{number} {name}" for name, number in counts.items() if number or name == "done"]
        left = "" if left_s is None else f"; all runs {duration(left_s)}"
        return f"{self._total} runs: {', '.join(words)}{left}"

    def _left_s(self, waiting: int) -> float | None:
        """Return the seconds left of all runs, from the ended runs and the speed of the running ones."""
        now = time.monotonic()
        lefts = [run.snapshot.left_s for run in self._running.values()]
        estimates = [
            now - run.started + run.snapshot.left_s for run in self._running.values() if run.snapshot.left_s is not None
        ]
        known = [*self._durations, *estimates]
        if not known:
            return None
        mean = sum(known) / len(known)
        lefts_or_mean = [mean if left is None else left for left in lefts]
        return max([(sum(lefts_or_mean) + waiting * mean) / self._num_at_once, *lefts_or_mean])

    def _table(self) -> Group:
        table = Table("run", "step", "loss", "measure", "left", box=None)
        for name, run in self._running.items():
            shot = run.snapshot
            table.add_row(
                Text(name, overflow="fold"),
                f"{shot.done}/{shot.total}",
                "" if shot.loss is None else f"{shot.loss:.4g}",
                shot.measured,
                "" if shot.left_s is None else duration(shot.left_s),
            )
        return Group(table, Text(self.totals()))

    def __enter__(self) -> "LiveTable":
        if is_terminal(self._console):
            self._live = self._owned.enter_context(
                Live(self._table(), console=self._console, auto_refresh=False, transient=True)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owned.close()
        self._live = None
