"""Signals at which a run saves its state and ends: SIGTERM, and SLURM's SIGUSR1."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_SAVED = 75  # EX_TEMPFAIL of sysexits.h; the run was stopped by SIGUSR1 and can be resumed


class StopSignals:
    """Record that a stop signal was received; the training loop reads ``number`` before each step.

    Attributes:
        number: The last signal received, 0 if there was none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._depth = 0

    @contextmanager
    def recorded(self, *numbers: int) -> Iterator[None]:
        """Record these signals in this context, by default all stop signals.

        A nested context keeps the signal recorded before it. Outside the main thread, where Python handles no
        signals, this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._depth:
            self.number = 0
        self._depth += 1
        before = {number: signal.signal(number, self._record) for number in numbers or STOP_SIGNALS}
        try:
            yield
        finally:
            self._depth -= 1
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.number = number


stop_signals = StopSignals()
