"""The Python stacks of a rank that others ask for: faulthandler writes them, also where the interpreter is blocked."""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

REQUEST = signal.SIGUSR2
_WAIT_S = 5.0  # for a process to write its stacks
_LOOK_S = 0.1
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_THREAD = re.compile(r"^(?:Current thread|Thread) .*:$", re.MULTILINE)
_OF_LIBRARIES = re.compile(r"/lib/python3|^<")


@contextmanager
def dumps_on_request(folder: Path) -> Iterator[None]:
    """Have this process append the stacks of all its threads to ``folder``/stack.log at each SIGUSR2."""
    with stack_path(folder).open("w") as file:
        faulthandler.register(REQUEST, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(REQUEST)
            signal.signal(REQUEST, signal.SIG_IGN)  # a request that comes late must not end the process


def request_stacks(processes: dict[Path, int]) -> None:
    """Have processes write their stacks, and wait until they have, or for a few seconds.

    A process that a signal has stopped goes on for this: it cannot write while it is stopped.

    Args:
        processes: The process id of each, by the folder that it gave to ``dumps_on_request``.
    """
    before = {folder: _size(folder) for folder in processes}
    for folder, pid in processes.items():
        if stack_path(folder).exists():  # the signal would end a process that does not expect it
            with suppress(OSError):
                os.kill(pid, REQUEST)
                os.kill(pid, signal.SIGCONT)  # after the request, so that this is the first that it does
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end and any(_size(folder) == size for folder, size in before.items()):
        time.sleep(_LOOK_S)
    time.sleep(_LOOK_S)  # for the last lines


def read_stack(folder: Path) -> str | None:
    """Return the stacks that a process has written, None if it has not."""
    with suppress(OSError):
        return stack_path(folder).read_text(errors="replace") or None
    return None


def place_in(stacks: str) -> str | None:
    """Return the innermost line of the main thread that is not of a library, from stacks as faulthandler writes them.

    faulthandler writes the main thread last.
    """
    frames = list(_FRAME.finditer(_THREAD.split(stacks)[-1]))
    own = [frame for frame in frames if not _OF_LIBRARIES.search(frame["file"])] or frames
    return f"{Path(own[0]['file']).name}:{own[0]['line']} in {own[0]['name']}" if own else None


def stack_path(folder: Path) -> Path:
    """Return the file of a process's stacks."""
    return folder / "stack.log"


def _size(folder: Path) -> int:
    try:
        return stack_path(folder).stat().st_size
    except OSError:
        return -1
