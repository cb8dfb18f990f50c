"""Beats: what a rank writes every few seconds, so that others can tell a rank that stands still from one that works.

A thread of its own writes them, so a long step, an evaluation, a slow disk under the data or a prompt of a debugger
does not hold them up. They end when the whole process is stopped, or when native code keeps the interpreter's lock.
Each says what the rank is doing, in which step, and in which collective it waits since when.
"""

import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from experiments.launching.process_state import process_state
from experiments.runs.atomic_files import from_json
from experiments.runs.run_folder import RunFolder

_SIZE = 2048  # bytes of the file: one write in place, and none that needs new space on a full disk
_LONGEST_S = 5.0  # between two beats
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One beat of a rank; durations are of the rank's own clock.

    Attributes:
        rank: of the run.
        host, pid, started: where the rank is; see process_state.
        number: of beats so far.
        activity: what the rank does, such as "step 12".
        activity_s: seconds since it began that.
        place: the line of Python that its main thread is in, without those of libraries.
        collective: the collective that it waits in, None if in none.
        collective_s: seconds since it began to wait.
        num_collectives: how many collectives it has begun.
    """

    rank: int
    host: str
    pid: int
    started: int
    number: int
    activity: str
    activity_s: float
    place: str
    collective: str | None
    collective_s: float
    num_collectives: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The collective that a process waits in, since when in seconds of time.monotonic, and how many it has begun."""

    collective: str | None = None
    since: float = 0.0
    num_begun: int = 0


class Activity:
    """What this process is doing: the training says it, each beat repeats it.

    Attributes:
        waiting: returns the collective that this process waits in; the training sets it.
    """

    def __init__(self) -> None:
        self.waiting: Callable[[], Waiting] = Waiting
        self.begin("the start")

    def begin(self, name: str) -> None:
        """Say what begins now."""
        self._now = (name, time.monotonic())

    def beat(self, rank: int, number: int) -> Beat:
        """Return what this process does at this moment, as a beat of a rank."""
        now = time.monotonic()
        name, since = self._now
        waiting = self.waiting()
        return Beat(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_started(),
            number=number,
            activity=name,
            activity_s=now - since,
            place=_place(sys._current_frames().get(threading.main_thread().ident or 0)),
            collective=waiting.collective,
            collective_s=now - waiting.since if waiting.collective else 0.0,
            num_collectives=waiting.num_begun,
        )


activity = Activity()


@cache
def _started() -> int:
    own = process_state(os.getpid())
    return own.started if own else 0


def beat_interval_s(timeout_s: float) -> float:
    """Return the seconds between two beats."""
    return min(_LONGEST_S, timeout_s / 20)


@contextmanager
def beating(run_dir: Path, rank: int, timeout_s: float) -> Iterator[None]:
    """Write a beat of this rank every few seconds while the context lasts.

    Args:
        timeout_s: the time limit of the run's collectives.
    """
    if not run_dir.is_dir():  # of another node, whose disk this one does not see
        yield
        return
    rank_folder(run_dir, rank).mkdir(parents=True, exist_ok=True)
    end = threading.Event()
    writer = threading.Thread(
        target=_write_beats, args=(beat_path(run_dir, rank), rank, beat_interval_s(timeout_s), end), daemon=True
    )
    writer.start()
    try:
        yield
    finally:
        end.set()


def read_beats(run_dir: Path) -> dict[int, Beat]:
    """Return the last beat of each rank that has written one."""
    beats = [read_beat(path) for path in RunFolder(run_dir).ranks_path.glob("rank*/beat.json")]
    return {beat.rank: beat for beat in beats if beat}


def read_beat(path: Path) -> Beat | None:
    """Return the beat in a file; None if there is none yet."""
    with suppress(OSError):
        return from_json(Beat, path.read_bytes())
    return None


def beat_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's last beat."""
    return rank_folder(run_dir, rank) / "beat.json"


def rank_folder(run_dir: Path, rank: int) -> Path:
    """Return the folder of what one rank writes."""
    return RunFolder(run_dir).ranks_path / f"rank{rank}"


def _write_beats(path: Path, rank: int, interval_s: float, end: threading.Event) -> None:
    number = 0
    with suppress(OSError):  # a rank without beats is judged by its processor time alone
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        while True:
            text = json.dumps(asdict(activity.beat(rank, number))).encode()
            os.pwrite(descriptor, text[:_SIZE].ljust(_SIZE), 0)
            number += 1
            if end.wait(interval_s):
                break
        path.unlink(missing_ok=True)  # this rank has ended its work and is to be judged no longer
        os.close(descriptor)


def _place(frame: FrameType | None) -> str:
    """Return the innermost line that is not of a library or of this watch, or the innermost of all."""
    innermost, others = frame, (*_LIBRARIES, str(Path(__file__).parent), "<frozen")
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "nowhere"
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno} in {found.f_code.co_name}"
