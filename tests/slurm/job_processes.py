"""Processes of a job on this machine, and signals to them."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.waiting import wait_until

RANK = "training.rank_main"


def processes(job: str, module: str) -> list[int]:
    """Return the processes of a job that run a module."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_text()
            if module in words and f"\0SLURM_JOB_ID={job}\0" in "\0" + (place / "environ").read_text():
                found.append(int(place.name))
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those processes that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until_pending(pids: list[int], number: signal.Signals, *, timeout_s: float) -> None:
    """Wait until a signal waits for processes that stand still."""
    wait_until(lambda: all(_is_pending(pid, number) for pid in pids), f"{number.name} to {pids}", timeout_s=timeout_s)


def _is_pending(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pending,) = [line.split()[1] for line in lines if line.startswith("ShdPnd:")]
    return bool(int(pending, 16) >> (number - 1) & 1)
