"""Calls of a process group's store that end: the store of a host that stands still never answers by itself."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
ANSWER_S = 5.0  # in which a store answers, however busy its host is


class StoreCalls:
    """Calls on one store, one after the other; each in a thread of its own, which is left behind if it never ends."""

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def call(self, function: Callable[[], T], default: T) -> T:
        """Return what ``function`` returns; ``default`` where the store is gone, or has not answered in time."""
        if self._last is not None and self._last.is_alive():
            return default  # it has not answered yet
        results: list[T] = []

        def work() -> None:
            with suppress(RuntimeError):  # the store is gone with the rank that had it
                results.append(function())

        self._last = threading.Thread(target=work, daemon=True, name="micro asks the store")
        self._last.start()
        self._last.join(ANSWER_S)
        return results[0] if results else default
