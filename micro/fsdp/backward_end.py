"""Run the exchange at the end of a backward, for every model in that backward, even if one raises."""

from collections.abc import Callable
from itertools import count

import torch


class BackwardEnd:
    """Calls ``end`` after all autograd callbacks that FSDP has queued, including those of other models.

    Autograd runs queued callbacks in order and stops at an exception. A model whose end is not called would keep
    gradients that differ between replicas. So the first callback ends all waiting models, in the order of their
    attachment, which is equal on all ranks, and then raises the first exception.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._number = next(_numbers)

    def wait_for_callbacks(self) -> None:
        """Schedule ``end``; called in a callback at the end of a backward."""
        _waiting[self._number] = self._end
        torch.autograd.Variable._execution_engine.queue_callback(_end_all)


_numbers = count()
_waiting: dict[int, Callable[[], None]] = {}


def _end_all() -> None:
    ends = [_waiting.pop(number) for number in sorted(_waiting)]
    errors: list[BaseException] = []
    for end in ends:
        try:
            end()
        except BaseException as error:
            errors.append(error)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # otherwise a reference cycle: traceback, this frame, errors
