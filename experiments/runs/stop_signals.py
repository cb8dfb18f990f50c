"""Save the state of a run and end on a stop signal."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from experiments.config.stopping import STOP_SIGNALS, exit_code, handled, leave_with

_AT_ONCE = "left without saving, at a second Ctrl-C: the same command resumes from the last checkpoint"


class StopSignals:
    """Record that a stop signal was received; the training loop reads ``number`` before each step.

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
                leave_with(_AT_ONCE, exit_code(signal.SIGINT))
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
