"""Stop signals during a run: it saves its state and ends."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from experiments.config.stopping import STOP_SIGNALS, exit_code, handled, leave_with

_SHOW_CURSOR = "\x1b[?25h"  # the display of the progress hides it


class StopSignals:
    """Record that a stop signal was received; the training loop reads ``number`` before each step.

    Attributes:
        number: The last signal received, 0 if there was none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._depth = 0
        self._then: list[Callable[[], None]] = []

    @contextmanager
    def recorded(self, *numbers: int, then: Callable[[], None] | None = None) -> Iterator[None]:
        """Record these signals in this context, by default all stop signals.

        A nested context keeps the signal recorded before it. A second Ctrl-C ends the process at once.

        Args:
            then: Called after each signal, and at once if one was recorded before.
        """
        if not self._depth:
            self.number = 0
        self._depth += 1
        calls = [then] if then else []
        self._then += calls
        try:
            with handled(self._record, numbers or STOP_SIGNALS):
                if self.number:
                    self._call()
                yield
        finally:
            self._depth -= 1
            del self._then[len(self._then) - len(calls) :]

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == self.number == signal.SIGINT:
            cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
            line = "left without saving, at a second Ctrl-C: the same command resumes from the last checkpoint"
            leave_with(f"{cursor}{line}", exit_code(number))
        self.number = number
        self._call()

    def _call(self) -> None:
        for call in self._then:
            call()


stop_signals = StopSignals()
