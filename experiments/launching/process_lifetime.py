"""How a process ends: with its parent, at once, or at SIGTERM as by an exception."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None, *, how: int = signal.SIGTERM) -> None:
    """Ask Linux to end this process when its parent dies, even by SIGKILL; elsewhere do nothing.

    Args:
        how: The signal that ends it. A rank takes SIGKILL: it may hang in a collective, where Python handles no other
            signal, and another attempt may be under way.
        parent: Process id that the parent had when it started this process, to notice a parent that died before
            this call; by default the parent of this moment.
    """
    if sys.platform != "linux":
        return
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != expected:
        signal.raise_signal(how)


def leave(code: int) -> NoReturn:
    """End this process without waiting for threads that may wait for a peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def exit_at_termination() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as an exception does, so that what was made is removed."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
        before = {number: signal.signal(number, _exit) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_all(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Kill the processes that still run, and wait for the end of all."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
