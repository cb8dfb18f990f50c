"""The header of an exchange: the count of each rank, whether its gradient was finite, and further integers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from micro.comm.requests import AllGather, Once, Reduction, known
from micro.exchanges.base import count_of
from micro.predicted_traffic import COUNT_BYTES, Call
from micro.values.finite import Finite, flag_of, on_device


@dataclass(frozen=True, slots=True)
class Header:
    """What all ranks know of each other before indices and values are sent.

    Attributes:
        counts: how many indices each rank chose.
        is_finite: whether the gradients of all ranks were finite; a tensor on an accelerator if counts were known.
        extras: further integers of each rank.
    """

    counts: tuple[int, ...]
    is_finite: Finite
    extras: list[list[int]]


def gather_header(
    chosen: Tensor, *, is_finite: Finite, extra: Tensor | None = None, counts: tuple[int, ...] | None = None
) -> Reduction[Header]:
    """Gather each rank's count, whether its gradient was finite, and m extra integers: 4 (m + 2) (n-1) bytes.

    Args:
        chosen: (count,) indices, or values, that this rank chose.
        is_finite: whether this rank's gradient was.
        extra: (m,) of any integer type, of equal length on all ranks.
        counts: of all ranks, if already known; then the host does not wait for the device, unless there is an extra.
    """
    if isinstance(is_finite, Tensor):
        row = torch.cat([count_of(chosen), flag_of(is_finite, torch.int32, chosen.device)])
    else:
        row = on_device([chosen.numel(), int(is_finite)], torch.int32, chosen.device)
    row = row if extra is None else torch.cat([row, extra.to(torch.int32)])
    gathered = yield AllGather(mine=row)
    if counts is not None and extra is None and not gathered.is_cpu:
        return Header(counts, gathered[:, 1].all(), [[] for _ in counts])
    (gathered,) = yield from known(gathered)  # list lengths shape what follows
    header: Header = yield Once(work=lambda: _header(gathered.tolist()))
    return header


def header_call(num_extras: int = 0) -> Call:
    """Return the collective of `gather_header`."""
    return "gather_rows", COUNT_BYTES * (2 + num_extras)


def _header(rows: list[list[int]]) -> Header:
    return Header(tuple(row[0] for row in rows), all(row[1] for row in rows), [row[2:] for row in rows])
