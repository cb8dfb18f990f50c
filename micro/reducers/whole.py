"""A step in which every value travels as it is: a dense all-reduce of the accumulators, without indices."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from micro.comm import Comm
from micro.exchanges.averaging import AverageEncoded, message_bytes
from micro.exchanges.base import Transport
from micro.feedback import Feedback
from micro.health import Finite, flag_of, is_number, is_zero, read
from micro.reducers.base import BucketState
from micro.reducers.outcome import cut_
from micro.reducers.rounding import write_
from micro.requests import AllReduce, Reduction
from micro.spans import Seconds
from micro.sparse import AllLeaving, AllValues, SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was sent in a step; counts, num_updated and is_finite are the same on all ranks.

    Attributes:
        counts: how many elements each rank chose.
        num_updated: distinct indices in the update.
        on_deliver: makes what is kept what was not sent.
        is_finite: whether all gradients and the update were.
        in_update: index of the first sum of finite gradients that overflowed, None where there is none.
        threshold: the cut on abs(acc), where there was one.
        select: seconds choosing.
        forgotten: see StepStats.
        first_bad: index of this rank's first sum that was left out, where the gradient was added while it was sent.
        overfull: whether a message of fixed capacity did not hold what was chosen.
        parts: whose indices are all at which the update may be other than zero; None: it may be anywhere.
    """

    counts: tuple[int, ...]
    num_updated: int
    on_deliver: Callable[[], object]
    is_finite: bool
    in_update: int | None
    threshold: float | None = None
    select: Seconds = 0.0
    forgotten: float | None = None
    overfull: bool = False
    first_bad: int | None = None
    parts: tuple[SparseValues, ...] | None = None


def send_all(
    state: BucketState, feedback: Feedback, acc: Tensor, grad: Tensor, comm: Comm, *, is_finite: Finite
) -> Reduction[Sent]:
    """Make ``grad`` (numel,) the mean of all accumulators; what the mean's rounding takes is kept.

    One all-reduce of acc, and of one more number: whether each rank's gradient was finite. The memory of the message is
    kept: from the second such step on nothing of the vector's length is allocated.

    Args:
        acc: (numel,) what ``feedback`` returned; in most cases the residual.
        is_finite: whether this rank's gradient was.
    """
    message = _message(state, acc)
    total = state.spare = message[:-1]
    total.copy_(acc)
    message[-1] = 1 - flag_of(is_finite, acc.dtype, acc.device)[0]
    yield AllReduce(mine=message)
    is_finite, overflow = _verdict(is_zero(message[-1]), is_number(total.sum()), total)
    if overflow is not None:  # on all ranks alike: the sums are the same bits everywhere
        cut_(acc, overflow, comm.world_size)
        is_finite = False
    unsent = _write_mean(total, grad, comm.world_size) if is_finite else None

    def on_deliver() -> None:
        feedback.settle_(state.memory, AllValues(acc), (), 1.0)
        if unsent is not None:
            feedback.keep_(state.memory, AllValues(unsent))

    return _sent(grad, comm, on_deliver, is_finite=is_finite, overflow=overflow)


def send_all_encoded(
    state: BucketState,
    feedback: Feedback,
    acc: Tensor,
    grad: Tensor,
    transport: Transport,
    average_: AverageEncoded,
    *,
    to_add: Tensor | None,
) -> Reduction[Sent]:
    """Make ``grad`` (numel,) the mean of all accumulators as they were encoded; what that lost is kept.

    What was the residual's memory becomes it again in the next step, and the bytes of the messages are kept: from the
    third such step on nothing of the vector's length is allocated but what is received.

    Args:
        acc: (numel,) what ``feedback`` returned; in most cases the residual.
        to_add: the gradient, where it has still to be added to acc: the pass that encodes does that.
        average_: the exchange, as a function of values at every index.
    """
    rest = _message(state, acc)[:-1] if state.residual.numel() else None
    state.spare = rest
    mean = grad if grad.dtype == acc.dtype else torch.empty_like(acc)
    state.wire = _bytes(state.wire, message_bytes(acc.numel(), transport, acc.dtype), acc.device)
    averaged = yield from average_(acc, transport, rest=rest, mean=mean, memory=state.wire, grad=to_add)
    is_finite, overflow = _verdict(averaged.is_finite, averaged.fits, mean)
    if overflow is not None:  # on all ranks alike: the means are the same bits everywhere
        cut_(acc, overflow, transport.comm.world_size)
        is_finite = False
    unsent = write_(mean, grad) if is_finite and mean is not grad else None

    def on_deliver() -> None:
        if rest is not None:
            state.spare = state.residual.detach()  # which gets the memory of the rest
            feedback.settle_(state.memory, AllLeaving(rest), (), 1.0)
        if unsent is not None:
            feedback.keep_(state.memory, AllValues(unsent))

    sent = _sent(grad, transport.comm, on_deliver, is_finite=is_finite, overflow=overflow)
    return replace(sent, first_bad=averaged.first_bad)


def _sent(
    grad: Tensor, comm: Comm, on_deliver: Callable[[], None], *, is_finite: bool, overflow: Tensor | None
) -> Sent:
    return Sent(
        counts=(grad.numel(),) * comm.world_size,
        num_updated=grad.numel(),
        on_deliver=on_deliver,
        is_finite=is_finite,
        in_update=None if overflow is None else int(overflow[0]),
    )


def _bytes(memory: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Return ``memory`` where it has room for ``size`` bytes, else such that has."""
    if memory is not None and memory.numel() >= size and memory.device == device:
        return memory
    return torch.empty(size, dtype=torch.uint8, device=device)


def _message(state: BucketState, acc: Tensor) -> Tensor:
    """Return memory for a message (numel + 1,): that of the step before, where it has room."""
    spare, size = state.spare, acc.numel() + 1
    if spare is None or spare.dtype != acc.dtype:
        return acc.new_empty(size)
    has_room = spare.untyped_storage().nbytes() >= size * spare.element_size()
    return spare.as_strided((size,), (1,)) if has_room else acc.new_empty(size)


def _verdict(is_finite: Finite, fits: Finite, total: Tensor) -> tuple[bool, Tensor | None]:
    """Return whether all gradients were finite, and where sums (numel,) are not, None where all are.

    An accelerator is read once.

    Args:
        fits: whether the sum of them is finite: then each is.
    """
    was_finite, is_sum_finite, *_ = read(is_finite, fits, 0)
    if not was_finite or is_sum_finite:
        return was_finite, None
    places = torch.nonzero(~torch.isfinite(total)).view(-1)
    return True, places if places.numel() else None


def _write_mean(total: Tensor, grad: Tensor, world_size: int) -> Tensor | None:
    """Write ``total / world_size`` into ``grad``; return what its dtype leaves out, None where both have one."""
    if total.dtype != grad.dtype:
        return write_(total.div_(world_size), grad)
    torch.div(total, world_size, out=grad)
    return None
