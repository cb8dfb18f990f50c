"""A step in which every value travels as it is: a dense all-reduce of the accumulators, without indices."""

from collections.abc import Callable
from dataclasses import dataclass

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
    is_finite, in_update = _checked(acc, total, is_zero(message[-1]), is_number(total.sum()), comm)
    unsent = None
    if is_finite and total.dtype == grad.dtype:
        torch.div(total, comm.world_size, out=grad)
    elif is_finite:
        unsent = write_(total.div_(comm.world_size), grad)

    def on_deliver() -> None:
        feedback.settle_(state.memory, AllValues(acc), (), 1.0)
        if unsent is not None:
            feedback.keep_(state.memory, AllValues(unsent))

    counts = (grad.numel(),) * comm.world_size
    return Sent(
        counts=counts, num_updated=grad.numel(), on_deliver=on_deliver, is_finite=is_finite, in_update=in_update
    )


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
    size = message_bytes(acc.numel(), transport, acc.dtype)
    if state.wire is None or state.wire.numel() < size or state.wire.device != acc.device:
        state.wire = torch.empty(size, dtype=torch.uint8, device=acc.device)
    averaged = yield from average_(acc, transport, rest=rest, mean=mean, memory=state.wire, grad=to_add)
    is_finite, in_update = _checked(acc, mean, averaged.is_finite, averaged.fits, transport.comm)
    unsent = write_(mean, grad) if is_finite and mean is not grad else None

    def on_deliver() -> None:
        if rest is not None:
            state.spare = state.residual.detach()  # which gets the memory of the rest
            feedback.settle_(state.memory, AllLeaving(rest), (), 1.0)
        if unsent is not None:
            feedback.keep_(state.memory, AllValues(unsent))

    return Sent(
        counts=(grad.numel(),) * transport.comm.world_size,
        num_updated=grad.numel(),
        on_deliver=on_deliver,
        is_finite=is_finite,
        in_update=in_update,
        first_bad=averaged.first_bad,
    )


def _message(state: BucketState, acc: Tensor) -> Tensor:
    """Return memory for a message (numel + 1,): that of the step before, where it has room."""
    spare, size = state.spare, acc.numel() + 1
    if spare is None or spare.dtype != acc.dtype or spare.untyped_storage().nbytes() < size * spare.element_size():
        return acc.new_empty(size)
    return spare.as_strided((size,), (1,))


def _checked(acc: Tensor, total: Tensor, is_finite: Finite, fits: Finite, comm: Comm) -> tuple[bool, int | None]:
    """Return whether all gradients and their sum are finite, and where the sum (numel,) of finite ones is not.

    There the accumulator is cut, on all ranks alike: their sums are the same bits. An accelerator is read once.

    Args:
        is_finite: whether all gradients are.
        fits: whether the sum of all sums is finite: then each is.
    """
    were_finite, is_sum_finite, *_ = read(is_finite, fits, 0)
    if not were_finite or is_sum_finite:
        return were_finite, None
    places = torch.nonzero(~torch.isfinite(total)).view(-1)
    if not places.numel():
        return True, None
    cut_(acc, places, comm.world_size)
    return False, int(places[0])
