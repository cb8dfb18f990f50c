"""A step in which every value travels and no index: an all-reduce of the accumulators, or of what a code keeps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from micro.comm.requests import AllReduce, Reduction, known
from micro.exchanges.averaging import AverageEncoded, Mean, message_bytes
from micro.exchanges.base import Transport
from micro.feedback import Feedback
from micro.reducers.base import BucketState
from micro.reducers.outcome import cut_
from micro.reducers.rounding import write_
from micro.values.finite import flag_of, is_number, is_zero
from micro.values.sparse import AllLeaving, AllValues, SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was sent in a step; counts, num_updated and is_finite are the same on all ranks.

    Attributes:
        counts: how many elements each rank chose.
        num_updated: distinct indices in the update.
        is_finite: whether all gradients and the update were.
        in_update: index of the first sum of finite gradients that overflowed, None where there is none.
        on_deliver: makes what is kept what was not sent.
        first_bad: index of this rank's first sum that was left out, where the gradient was added while it was sent.
        parts: whose indices are all at which the update may be other than zero; None: it may be anywhere.
        record: fields of the step's statistics, where they are not the usual.
    """

    counts: tuple[int, ...]
    num_updated: int
    is_finite: bool
    in_update: int | None
    on_deliver: Callable[[], object]
    first_bad: int | None = None
    parts: tuple[SparseValues, ...] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


def send_all(
    state: BucketState,
    feedback: Feedback,
    acc: Tensor,
    grad: Tensor,
    transport: Transport,
    average_: AverageEncoded,
    *,
    to_add: Tensor | None = None,
) -> Reduction[Sent]:
    """Make ``grad`` (numel,) the mean of all accumulators; what a code or the mean's rounding loses of them is kept.

    The memory of the messages is kept, and with a code it and the residual's change places: after a few such steps
    nothing of the vector's length is allocated but what is received.

    Args:
        acc: (numel,) what ``feedback`` returned; in most cases the residual.
        average_: the exchange of encoded values.
        to_add: the gradient, where it has still to be added to acc: the pass that encodes does that.
    """
    comm, numel = transport.comm, grad.numel()
    message = _memory(state, acc)
    same_dtype = grad.dtype == acc.dtype
    if transport.wire.values.lossless:
        total = state.spare = message[:-1]
        total.copy_(acc)
        message[-1] = 1 - flag_of(transport.step.is_finite, acc.dtype, acc.device)[0]
        yield AllReduce(mine=message)
        mean = torch.div(total, comm.world_size, out=grad if same_dtype else total)
        averaged = Mean(is_zero(message[-1]), is_number(mean.sum()))
        sent: AllValues | None = AllValues(acc)
    else:
        rest = state.spare = message[:-1] if state.residual.numel() else None
        mean = grad if same_dtype else torch.empty_like(acc)
        wire = _wire(state, message_bytes(numel, transport, acc.dtype), acc.device)
        averaged = yield from average_(acc, transport, rest=rest, mean=mean, memory=wire, grad=to_add)
        sent = None if rest is None else AllLeaving(rest)
    is_finite, fits = yield from known(averaged.is_finite, averaged.fits, last=True)
    in_update = None
    if is_finite and not fits:
        overflow = torch.nonzero(~torch.isfinite(mean)).view(-1)
        cut_(acc, overflow, comm.world_size)
        in_update = int(overflow[0]) if overflow.numel() else None
        is_finite = in_update is None
    unsent = write_(mean, grad) if is_finite and mean is not grad else None

    def on_deliver() -> None:
        if isinstance(sent, AllLeaving):
            state.spare = state.residual.detach()  # which gets the memory of the rest
        if sent is not None:
            feedback.settle_(state.memory, sent, (), 1.0)
        if unsent is not None:
            feedback.keep_(state.memory, AllValues(unsent))

    return Sent(
        counts=(numel,) * comm.world_size,
        num_updated=numel,
        is_finite=bool(is_finite),
        in_update=in_update,
        on_deliver=on_deliver,
        first_bad=averaged.first_bad,
    )


def _memory(state: BucketState, acc: Tensor) -> Tensor:
    """Return memory for a message (numel + 1,): that of the step before, where it has room."""
    spare, size = state.spare, acc.numel() + 1
    if spare is None or spare.dtype != acc.dtype or spare.untyped_storage().nbytes() < size * spare.element_size():
        return acc.new_empty(size)
    return spare.as_strided((size,), (1,))


def _wire(state: BucketState, num_bytes: int, device: torch.device) -> Tensor:
    """Return at least so many bytes for encoded values: those of the step before, where they are enough."""
    if state.wire is None or state.wire.numel() < num_bytes or state.wire.device != device:
        state.wire = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return state.wire
