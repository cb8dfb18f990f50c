"""The ends of backwards: where several models share one, all of them end, whatever is raised in one."""

from collections.abc import Callable
from itertools import count

import torch


class BackwardEnd:
    """Calls ``end`` behind the callbacks of autograd that FSDP has queued, those of other models too.

    Autograd calls what is queued one after the other, and after an exception nothing more. A model whose end is not
    called would keep gradients that differ between replicas. So the first callback ends all models that wait, in the
    order in which they were attached, which is the same on all ranks, and then raises the first exception.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._number = next(_numbers)

    def wait_for_callbacks(self) -> None:
        """Have ``end`` called; inside of a callback at the end of a backward."""
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
        errors.clear()  # its traceback holds this frame, which would hold it
