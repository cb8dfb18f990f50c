"""Watch the ranks of a run while it lasts, and end it when one of them stands still; see stalls.py for the rules."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from experiments.launching.process_state import process_state
from experiments.launching.watching.beats import beat_interval_s, read_beats
from experiments.launching.watching.stall_report import StallReport, has_stall_report, write_stall_report
from experiments.launching.watching.stalls import Seen, Stall, StallRules


class RankWatch:
    """A thread that looks at the beats and the processes of the ranks, and calls ``end`` once if the run stands still.

    Before that, the finding goes to the run folder, where the watchers of other hosts see it.

    Args:
        run_dir: the run folder.
        timeout_s: the time limit of the run's collectives.
        own_ranks: returns the process ids of the ranks of this host that run now.
        end: ends the ranks of this host; gets the finding.
        may_end: whether this watcher is the one of its host that ends the run.
    """

    def __init__(
        self,
        run_dir: Path,
        timeout_s: float,
        *,
        own_ranks: Callable[[], Mapping[int, int]],
        end: Callable[[StallReport], None],
        may_end: Callable[[Stall, Mapping[int, int]], bool] = lambda stall, own: True,
    ) -> None:
        self._run_dir, self._own_ranks, self._end, self._may_end = run_dir, own_ranks, end, may_end
        self._rules = StallRules(timeout_s)
        self._grace_s = timeout_s / 10  # in which the host of a rank finds out itself
        self._interval_s = beat_interval_s(timeout_s)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._seen: dict[int, Seen] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(self._interval_s)  # a disk that does not answer holds it up, and nobody else

    def missed(self) -> Stall | None:
        """Return the rank that the others waited for when all ranks were last seen, None if that cannot be told."""
        return self._rules.behind(self._seen)

    def _watch(self) -> None:
        first: float | None = None
        while not self._over.wait(self._interval_s):
            now = time.monotonic()
            pids = dict(self._own_ranks())
            seen = self._look(pids)
            if len(seen) >= len(self._seen):
                self._seen = seen
            stall = self._rules.look(now, seen)
            if stall is None or not self._may_end(stall, pids):
                first = None
                continue
            first = now if first is None else first
            if stall.rank in pids or has_stall_report(self._run_dir) or now - first >= self._grace_s:
                finding = StallReport(stall.rank, stall.message(), time.time())
                self._end(write_stall_report(self._run_dir, finding))
                return

    def _look(self, pids: Mapping[int, int]) -> dict[int, Seen]:
        seen: dict[int, Seen] = {}
        for rank, beat in read_beats(self._run_dir).items():
            process = process_state(pids[rank]) if rank in pids else None
            if rank not in pids or (process and (beat.pid, beat.started) == (pids[rank], process.started)):
                seen[rank] = Seen(beat, process)
        return seen


def kill_ranks(pids: Mapping[int, int]) -> None:
    """End ranks at once: they may wait in a collective, where Python handles no signal."""
    for pid in pids.values():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
