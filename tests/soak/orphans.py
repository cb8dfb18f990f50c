"""The processes below this one, those included whose parents have died."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_WAIT_S = 20.0  # for processes that end with their parent, on a busy machine


def adopt() -> None:
    """Become the parent of all processes below this one whose parents die."""
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1):
        raise OSError("this system has no subreapers")


def descendants() -> list[int]:
    """Return the ids of all processes below this one."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(word) for word in (task / "children").read_text().split()]
        found.append(pid)
    return [pid for pid in dict.fromkeys(found) if pid != os.getpid()]


def wait_for_end() -> dict[int, str]:
    """Wait some seconds for the end of all processes below this one; kill the others, and return their states."""
    end, pause_s = time.monotonic() + _WAIT_S, 0.005
    while _running() and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)
    left = {pid: _state_of(pid) for pid in _running()}
    while alive := _running():
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left


def _running() -> list[int]:
    """Collect the children that have ended; return those below this process that run."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants()


def _state_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "ended"
