"""One process of a machine compiles a loop, those that want it at the same time take it from the disk.

All ranks of a node reach a loop for the first time at once, and each would compile it: seconds of a core each.
"""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock

LONGEST_S = 60.0  # a process that stands still while it compiles holds the others up no longer
_POLL_S = 0.02


def compile_once(compiled: Any) -> None:
    """Have processes take turns in compiling a loop that numba keeps on disk.

    numba looks for a kept loop in `compile`, and keeps it there, so the next process to enter finds it. Where numba
    keeps nothing, or is made otherwise, nothing changes: what is replaced here is not public.
    """
    folder = getattr(getattr(compiled, "_cache", None), "cache_path", None)
    if folder is None:
        return
    compile_alone: Callable[[Any], Any] = compiled.compile
    path = Path(folder) / f"{compiled.py_func.__module__}.{compiled.py_func.__qualname__}.lock"

    def compile_in_turn(signature: Any) -> Any:
        # numba's own lock first: another thread may hold it and wait for the file.
        with global_compiler_lock, _locked(path):
            return compile_alone(signature)

    compiled.compile = compile_in_turn


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, which ends with the process; go on without it where it cannot be had."""
    try:
        file = path.open("a")
    except OSError:
        yield
        return
    with file:
        end = time.monotonic() + LONGEST_S
        while not _taken(file) and time.monotonic() < end:
            time.sleep(_POLL_S)
        yield


def _taken(file: Any) -> bool:
    """Take the lock; return whether to wait no longer: it is taken, or the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
