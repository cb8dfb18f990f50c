"""Wait for what other processes do."""

import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 300.0  # only for hanging tests: on a busy machine seconds may become a minute


def wait_until(holds: Callable[[], object], what: str, *, timeout_s: float = LIMIT_S) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: it does not hold within the time.
    """
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended counts as dead before its parent has collected it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
