"""Ways to end a process: with its parent, at once, or at SIGTERM by an exception."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None, *, how: int = signal.SIGTERM) -> None:
    """Have Linux end this process when its parent dies, even by SIGKILL; on other systems do nothing.

    Args:
        how: The signal that ends it. A rank uses SIGKILL: it may hang in a collective, where Python handles no other
            signal, while another attempt is already running.
        parent: Process id of the parent when it started this process, to detect that it died before this call; by
            default the current parent.
    """
    if sys.platform != "linux":
        return
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != expected:
        signal.raise_signal(how)


def leave(code: int) -> NoReturn:
    """End this process without waiting for its threads, which may wait for a peer."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # on a full disk, for instance
            stream.flush()
    os._exit(code)


@contextmanager
def exit_at_termination() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit in this context, so that cleanup code runs."""
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
    """Kill the processes that still run, and wait for all to end."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
