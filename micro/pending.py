"""The collectives that this process has begun and that have not ended: what a watchdog asks a rank that waits."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager


class PendingCollectives:
    """The collectives of ``micro`` in this process, of all groups and threads.

    Attributes:
        num_begun: how many began so far: the same on all ranks that have reached the same place.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[str, float]] = {}
        self.num_begun = 0

    def begin(self, name: str) -> int:
        """List a collective; return the number with which it is ended."""
        number = self.num_begun = next(self._numbers)
        self._pending[number] = (name, time.monotonic())
        return number

    def end(self, number: int) -> None:
        """Take a collective off the list."""
        self._pending.pop(number, None)

    @contextmanager
    def listed(self, name: str) -> Iterator[None]:
        """List a collective while the context lasts."""
        number = self.begin(name)
        try:
            yield
        finally:
            self.end(number)

    def oldest(self) -> tuple[str, float] | None:
        """Return the name of the collective that was begun first, and since when in seconds of time.monotonic."""
        found = sorted(self._pending.copy().items())
        return found[0][1] if found else None


pending = PendingCollectives()
