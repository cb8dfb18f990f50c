"""Identify a launcher to its ranks, and end processes: with their parent, or at once."""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

LAUNCHER_PID = "MICRO_LAUNCHER_PID"
TERMINAL = "MICRO_TERMINAL"  # the path of the launcher's terminal, on which rank 0 may draw
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Have Linux kill this process when its parent dies, even by SIGKILL; on other systems do nothing.

    SIGKILL, since a rank may hang in a collective, where Python handles no other signal, while another attempt is
    already running.

    Args:
        parent: Process id of the parent when it started this process, to detect that it died before this call; by
            default the current parent.
    """
    if sys.platform == "linux":
        expected = os.getppid() if parent is None else parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != expected:
            signal.raise_signal(signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """End this process without waiting for its threads, which may wait for a peer."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # on a full disk, for instance
            stream.flush()
    os._exit(code)
