"""Show how far the runs of a sweep are that go on at the same time."""

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
class _Under:
    """A run under way."""

    reader: RunReader
    snapshot: Snapshot
    started: float

    def refresh(self) -> None:
        self.snapshot = self.reader.read()


class Board:
    """A line per run under way and one of totals: a table on a terminal, plain lines now and then elsewhere.

    Args:
        console: Where to draw.
        total: Runs of the sweep.
        done: Those of them that were finished before.
        num_at_once: Runs that go on at the same time.
    """

    def __init__(self, console: Console, *, total: int, done: int, num_at_once: int) -> None:
        self._console = console
        self._total, self._num_at_once = total, num_at_once
        self._num_done, self._num_failed = done, 0
        self._under: dict[str, _Under] = {}
        self._durations: list[float] = []
        self._drawn = time.monotonic()
        self._live: Live | None = None
        self._owned = ExitStack()

    def begin(self, run: str, run_dir: Path, *, total_steps: int) -> None:
        """Add a run; its records may not exist yet."""
        empty = Snapshot(run, done=0, total=total_steps)
        self._under[run] = _Under(RunReader(run_dir, total_steps, run), empty, time.monotonic())

    def done(self, run: str) -> None:
        """Take a run off that is finished."""
        under = self._under.pop(run)
        under.refresh()
        self._num_done += 1
        self._durations.append(time.monotonic() - under.started)
        self.say(f"done: {under.snapshot.line()}")

    def failed(self, run: str, why: str) -> None:
        """Take a run off that failed."""
        del self._under[run]
        self._num_failed += 1
        self.say(f"failed: {run}: {why}")

    def stopped(self, run: str) -> None:
        """Take a run off that a signal stopped; it is waiting again."""
        del self._under[run]
        self.say(f"stopped: {run}")

    def say(self, line: str) -> None:
        """Print a line above the table."""
        print_plain(self._console, line)

    def draw(self) -> None:
        """Draw again, if it is time to."""
        every_s = _REDRAW_S if self._live else _LINES_EVERY_S
        if time.monotonic() - self._drawn < every_s:
            return
        self._drawn = time.monotonic()
        for under in self._under.values():
            under.refresh()
        if self._live:
            self._live.update(self._table(), refresh=True)
            return
        for under in self._under.values():
            self.say(under.snapshot.line())
        self.say(self.totals())

    def totals(self) -> str:
        """Return what is done and what is left, in words."""
        waiting = self._total - self._num_done - self._num_failed - len(self._under)
        left_s = self._left_s(waiting)
        counts = {"done": self._num_done, "failed": self._num_failed, "running": len(self._under), "waiting": waiting}
        words = [f"{number} {name}" for name, number in counts.items() if number or name == "done"]
        left = "" if left_s is None else f"; all runs {duration(left_s)}"
        return f"{self._total} runs: {', '.join(words)}{left}"

    def _left_s(self, waiting: int) -> float | None:
        """Return the seconds left of all runs, from those that ended and from the pace of those under way."""
        now = time.monotonic()
        lefts = [under.snapshot.left_s for under in self._under.values()]
        paced = [
            now - under.started + under.snapshot.left_s
            for under in self._under.values()
            if under.snapshot.left_s is not None
        ]
        known = [*self._durations, *paced]
        if not known:
            return None
        mean = sum(known) / len(known)
        under_way = [mean if left is None else left for left in lefts]
        return max([(sum(under_way) + waiting * mean) / self._num_at_once, *under_way])

    def _table(self) -> Group:
        table = Table("run", "step", "loss", "measure", "left", box=None)
        for run, under in self._under.items():
            shot = under.snapshot
            table.add_row(
                Text(run, overflow="fold"),
                f"{shot.done}/{shot.total}",
                "" if shot.loss is None else f"{shot.loss:.4g}",
                shot.measured,
                "" if shot.left_s is None else duration(shot.left_s),
            )
        return Group(table, Text(self.totals()))

    def __enter__(self) -> "Board":
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
