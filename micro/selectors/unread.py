"""Choices on an accelerator of which no host knows yet how long they are: all ranks read the counts in one message.

On a CPU a list's length is known when it is made. On an accelerator a read of it waits for all that was queued. So a
choice is collected into a list with room (`micro.kernels.above_unread`), and its count travels to all ranks, with
whether gradients were finite and whatever the selector has to learn from the step: one read serves for all of it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from micro.comm import Comm
from micro.health import flag_of
from micro.on_device import on_device
from micro.selectors.asking import Ask, Asking
from micro.sparse import UNKNOWN, Listed, Selection, Step, Unread

__all__ = ["UNKNOWN", "Listed", "Unread", "counted"]


def counted(choice: Unread, step: Step, comm: Comm) -> Asking[Selection]:
    """Return this rank's choice, with every rank's count and whether all gradients were finite: one read by the host.

    Where the count of any rank was not known, that rank chooses once more, and all gather the counts once more. Where
    the exchange reads the choice, it is returned unread.
    """
    if step.reads_late:
        assert isinstance(choice, Listed), "else the selector does not say that it can be read late"
        return Selection(choice.indices, unread=choice)
    mine = choice.numbers()
    flag = flag_of(step.is_finite, torch.float64, mine.device)
    rows = yield Ask("gather_rows", torch.cat([mine, flag]), is_read=True)
    answers: list[list[float]] = rows.tolist()
    selection = choice.settled(answers[comm.rank][:-1])
    is_retried = any(row[0] == UNKNOWN for row in answers)
    if is_retried:
        number = on_device([selection.indices.numel()], torch.float64, mine.device)
        answers = [[*after, before[-1]] for after, before in zip((yield from _read(number)), answers, strict=True)]
    return replace(
        selection,
        counts=tuple(int(row[0]) for row in answers),
        is_finite=all(row[-1] for row in answers),
        overfull=is_retried,
    )


def _read(number: Tensor) -> Asking[list[list[float]]]:
    rows = yield Ask("gather_rows", number, is_read=True)
    return rows.tolist()
