"""The watch over ranks that torchrun or srun started: in each rank, because their launcher knows nothing of beats."""

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.launching.process_lifetime import leave
from experiments.launching.process_state import process_state
from experiments.launching.watching.beats import beating, read_beats
from experiments.launching.watching.rank_watch import RankWatch, kill_ranks
from experiments.launching.watching.stall_report import StallReport
from experiments.launching.watching.stalls import Stall


@contextmanager
def watched_rank(run_dir: Path, rank: int, timeout_s: float) -> Iterator[None]:
    """Write beats of this rank, and end it, with the rank that stands still, when the run does.

    On each host the rank of the lowest number does so, or the next if that is the one that stands still. It prints one
    line. What started the ranks ends the others, whose collectives fail.
    """

    def end(report: StallReport) -> None:
        print(f"error: {run_dir.name}: rank {report.rank} failed: {report.message}", file=sys.stderr)
        kill_ranks({number: pid for number, pid in _ranks_here(run_dir).items() if number == report.rank != rank})
        leave(1)

    def may_end(stall: Stall, here: Mapping[int, int]) -> bool:
        return rank == min((number for number in here if number != stall.rank), default=rank)

    watch = RankWatch(run_dir, timeout_s, own_ranks=lambda: _ranks_here(run_dir), end=end, may_end=may_end)
    with beating(run_dir, rank, timeout_s), watch:
        yield


def _ranks_here(run_dir: Path) -> dict[int, int]:
    """Return the process ids of the ranks of this host that run, by their beats."""
    found: dict[int, int] = {}
    for rank, beat in read_beats(run_dir).items():
        with suppress(OSError):
            process = process_state(beat.pid) if beat.host == socket.gethostname() else None
            if process and process.started == beat.started:
                found[rank] = beat.pid
    return found
