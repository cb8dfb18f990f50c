"""What the kernel says of another process of this host: whether it is stopped, and how much processor time it had."""

from dataclasses import dataclass
from pathlib import Path

STOPPED, TRACED = "T", "t"  # by a signal; by a debugger
_ENDED = "ZX"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process as proc(5) describes it.

    Attributes:
        letter: R running, S sleeping, D waiting for a disk, T stopped by a signal, t stopped by a debugger.
        parent: process id of its parent.
        cpu_ticks: processor time of all of its threads, in ticks of the clock.
        started: when it started, in ticks since boot; with the process id this identifies the process.
    """

    letter: str
    parent: int
    cpu_ticks: int
    started: int


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process; None if it has ended, or where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in _ENDED:
        return None
    return ProcessState(fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]))
