"""Handle stop signals of a command: SIGINT (Ctrl-C), SIGTERM, and SIGUSR1, which SLURM sends before a time limit.

Every phase of a command has one handler:

    leave       imports, and checks before a run: nothing can be lost, and an exception could be lost in an import
    raise_stop  work that cleans up after itself
    recorded    a run, which saves its state first: ``stop_signals``

Signals that are ignored at the start stay ignored: nohup and background jobs of scripts rely on it, for SIGINT.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXIT_SAVED = 75  # EX_TEMPFAIL of sysexits.h; the run was stopped by SIGUSR1 and can be resumed
NOTHING_SAVED = "with nothing to save: run the same command again"
_AT_ONCE = "left without saving, at a second Ctrl-C: the same command resumes from the last checkpoint\n"
Handler = Callable[[int, FrameType | None], None]


class Stopped(SystemExit):
    """A signal other than SIGINT ends a command.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(exit_code(number))
        self.number = number


class Interrupted(KeyboardInterrupt):
    """SIGINT ends a command.

    Python ends a process by SIGINT, whatever its exit code, once KeyboardInterrupt itself has left a call of ``exec``,
    as imports make many; no subclass of it does that.
    """


def exit_code(number: int) -> int:
    """Return the exit code of a command that a signal ended."""
    return EXIT_SAVED if number == signal.SIGUSR1 else 128 + number


def name_of(number: int) -> str:
    """Return the usual name of a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """End this process at once, after one line; the handler while there is nothing to save."""
    end_process(exit_code(number), f"stopped by {name_of(number)}, {NOTHING_SAVED}\n")


def end_process(code: int, text: str = "") -> NoReturn:
    """End this process at once, without waiting for its threads, after a text on standard error."""
    for stream in (sys.stdout, sys.stderr):
        # The stream may be broken, in use by the interrupted code, closed, or missing.
        with suppress(OSError, RuntimeError, ValueError, AttributeError):
            stream.flush()
    with suppress(OSError):
        os.write(2, text.encode())
    os._exit(code)


def raise_stop(number: int, frame: FrameType | None) -> NoReturn:
    """Raise Interrupted or Stopped, so that cleanup code runs."""
    if number == signal.SIGINT:
        raise Interrupted
    raise Stopped(number)


@contextmanager
def handled(handler: Handler, numbers: Sequence[int] = STOP_SIGNALS) -> Iterator[None]:
    """Let these signals call ``handler`` in this context, except ignored ones.

    Outside the main thread, where Python handles no signals, this does nothing.
    """
    before = _set(handler, numbers) if current_thread() is main_thread() else {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def begin_command() -> None:
    """Let the stop signals end this process, at the start of a command; see ``leave``."""
    _set(leave, STOP_SIGNALS)


def end_command() -> None:
    """Ignore stop signals after ``begin_command``, when the exit code is decided."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is leave:
            signal.signal(number, signal.SIG_IGN)


def _set(handler: Handler, numbers: Sequence[int]) -> dict[int, Any]:
    heeded = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in heeded}


class StopSignals:
    """Record that a stop signal was received during a run; the training loop reads ``number`` before each step.

    Attributes:
        number: The last signal received, 0 if there was none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._depth = 0

    @contextmanager
    def recorded(self, then: Callable[[int], None] | None = None) -> Iterator[None]:
        """Record stop signals in this context; a nested one keeps the signal recorded before it.

        A second Ctrl-C ends the process at once.

        Args:
            then: Called with the first signal, and at once if one was recorded before; it may raise.
        """

        def record(number: int, frame: FrameType | None) -> None:
            if number == self.number == signal.SIGINT:
                end_process(exit_code(signal.SIGINT), _AT_ONCE)
            is_first = not self.number
            self.number = number
            if then and is_first:
                then(number)

        if not self._depth:
            self.number = 0
        self._depth += 1
        try:
            with handled(record, STOP_SIGNALS):
                if then and self.number:
                    then(self.number)
                yield
        finally:
            self._depth -= 1


stop_signals = StopSignals()
