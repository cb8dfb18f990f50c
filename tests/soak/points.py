"""The points of a run's processes at which faults come, counted; a process stands still at one that has a fault.

A process of a run reads from its environment at which counts of which points to stop. There it sends its position to
the soak, which carries the fault out and answers. The counts are in files, which are read after the processes ended.
"""

import faulthandler
import functools
import json
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "MICRO_SOAK"  # a JSON object: the folder of the attempt, and {role: {point: [counts]}}
STACKS = signal.SIGRTMIN + 5  # at which a process writes its stacks; no run uses it
POINTS = ("start", "disk", "row", "collective", "step", "save")
_DISK = ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "ftruncate", "truncate")  # of os


def role_of(module: str) -> str:
    """Return the name of this process within its run."""
    if module == "torch.distributed.run":
        return "agent"
    number = os.environ.get("RANK")
    return f"rank{number}" if number is not None else os.environ.get("MICRO_SOAK_ROLE", "command")


def install(role: str) -> None:
    """Count the points of this process, which has the name ``role``, and stop at those that have a fault."""
    given = json.loads(os.environ[VARIABLE])
    folder = Path(given["folder"])
    stacks = (folder / f"{role}.stacks").open("w")
    faulthandler.register(STACKS, file=stacks, all_threads=True)
    counts = _Counts(folder / f"{role}.{os.getpid()}.counts")
    at = {point: set(numbers) for point, numbers in given["faults"].get(role, {}).items()}
    reached = functools.partial(_reached, role, folder / "socket", counts, at)
    _tell(folder / "socket", {"role": role, "pid": os.getpid()})
    _watch(reached)
    reached("start")


def read_counts(folder: Path) -> dict[str, dict[str, int]]:
    """Return how often the processes of an attempt reached each point, by role; the most of those with one role."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("*.counts")):
        numbers = struct.unpack(f"{len(POINTS)}q", path.read_bytes())
        role = found.setdefault(path.name.split(".")[0], dict.fromkeys(POINTS, 0))
        for point, number in zip(POINTS, numbers, strict=True):
            role[point] = max(role[point], number)
    return found


class _Counts:
    """A counter per point, in a file that outlives the process."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8 * len(POINTS)))
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def add(self, point: str) -> int:
        index = POINTS.index(point)
        self._numbers[index] += 1
        return self._numbers[index]


def _reached(role: str, place: Path, counts: _Counts, at: Mapping[str, set[int]], point: str) -> None:
    number = counts.add(point)
    if number in at.get(point, ()):
        answer = _tell(place, {"role": role, "pid": os.getpid(), "point": point, "number": number})
        if answer.get("clock"):
            _jump(answer["clock"])


def _tell(place: Path, message: Mapping[str, Any]) -> dict[str, Any]:
    """Send a message to the soak and wait for its answer; an empty one if the soak has ended."""
    try:
        with socket.socket(socket.AF_UNIX) as wire:
            wire.connect(str(place))
            wire.sendall(json.dumps(message).encode() + b"\n")
            answer = b"".join(iter(lambda: wire.recv(1 << 12), b""))
    except OSError:
        return {}
    return json.loads(answer) if answer else {}


def _jump(seconds: float) -> None:
    """Have the clock of this process jump; the monotonic clock goes on, as it does when a machine's time is set."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


def _watch(reached: Callable[[str], None]) -> None:
    """Have the functions that are points call ``reached`` before their work, and, for a row, after it too."""
    from experiments.runs.checkpointing import Checkpointer
    from experiments.runs.records import RecordWriter
    from experiments.training.loop import Trainer
    from micro.comm import Comm

    for name in _DISK:
        _wrap(os, name, lambda *_: reached("disk"))
    _wrap(Comm, "_counted", lambda comm, *_: reached("collective") if _counts(comm) else None)
    _wrap(RecordWriter, "append", lambda *_: reached("row"), after=True)
    _wrap(Trainer, "step", lambda *_: reached("step"))
    _wrap(Checkpointer, "save", lambda *_: reached("save"), after=True)


def _counts(comm: Any) -> bool:
    """Return whether a collective is counted: of simulated ranks, which are threads, those of the last."""
    from micro.comm import GroupComm

    return isinstance(comm, GroupComm) or comm.rank == comm.world_size - 1


def _wrap(owner: Any, name: str, before: Callable[..., Any], *, after: bool = False) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **settings: Any) -> Any:
        before(*arguments)
        result = function(*arguments, **settings)
        if after:
            before(*arguments)
        return result

    setattr(owner, name, wrapped)
