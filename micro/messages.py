"""The collectives in which requests travel over a process group: the only file that starts those of a step.

Requests of one kind that are due at the same time share a collective.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from micro.operations import travels_padded
from micro.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast, Sending

LARGE_BYTES = 1 << 20  # a sum of this size travels alone: to copy it costs more than a collective


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective under way.

    Attributes:
        work: to wait for.
        device: of what it fills.
        received: returns what it has brought to each of the requests that it carries.
    """

    work: Any
    device: torch.device
    received: Callable[[], list[Tensor]]


def way_of(request: Sending) -> tuple[Hashable, ...]:
    """Return what is equal for requests that travel together, the same on all ranks; see `start`."""
    if isinstance(request, AllReduce):
        return _sum, request.mine.dtype, id(request) if request.mine.nbytes >= LARGE_BYTES else None
    if isinstance(request, Broadcast):
        return _copy, request.mine.dtype, request.source
    is_row = isinstance(request, AllGather) or (isinstance(request, AllGatherLists) and travels_padded(request.counts))
    return (_gather_rows,) if is_row else (_send_parts,)


def start(way: tuple[Any, ...], requests: Sequence[Any], group: dist.ProcessGroup | None) -> Collective:
    """Start the collective of requests that travel in one ``way``."""
    collective: Collective = way[0](requests, group)
    return collective


def _gather_rows(requests: Sequence[AllGather | AllGatherLists], group: dist.ProcessGroup | None) -> Collective:
    """Gather rows, as bytes where there are several: received is (world_size, m) for each."""
    rows = [_row(request) for request in requests]
    sent = rows[0] if len(rows) == 1 else torch.cat([_bytes_of(row) for row in rows])
    filled = sent.new_empty((requests[0].comm.world_size, sent.numel()))
    work = all_gather_single()(filled.view(-1), sent, group=group, async_op=True)

    def received() -> list[Tensor]:
        if len(rows) == 1:
            return [filled]
        parts = filled.split([row.nbytes for row in rows], dim=1)
        return [part.contiguous().view(row.dtype) for part, row in zip(parts, rows, strict=True)]

    return Collective(work, filled.device, received)


def _row(request: AllGather | AllGatherLists) -> Tensor:
    """Return the row of a rank; a list is filled up to the longest."""
    if isinstance(request, AllGather):
        return request.mine.contiguous()
    return torch.nn.functional.pad(request.mine, (0, max(request.counts) - request.mine.numel()))


def _send_parts(requests: Sequence[AllGatherLists | AllToAll], group: dist.ProcessGroup | None) -> Collective:
    """Send each rank its parts, as bytes where there are several requests: received is (sum(sizes),) for each."""
    sent, to_ranks, from_ranks = zip(*(_parts(request) for request in requests), strict=True)
    if len(requests) == 1:
        filled = sent[0].new_empty(sum(from_ranks[0]))
        work = dist.all_to_all_single(filled, sent[0], from_ranks[0], to_ranks[0], group=group, async_op=True)
        return Collective(work, filled.device, lambda: [filled])
    by_rank = [_split(*parts) for parts in zip(sent, to_ranks, strict=True)]
    whole = torch.cat([part for of_rank in zip(*by_rank, strict=True) for part in of_rank])
    to_sizes = [sum(part.numel() for part in of_rank) for of_rank in zip(*by_rank, strict=True)]
    lengths = [
        [count * x.element_size() for count in counts] for x, counts in zip(sent, from_ranks, strict=True)
    ]  # of each request, from each rank
    from_sizes = [sum(of_rank) for of_rank in zip(*lengths, strict=True)]
    filled = whole.new_empty(sum(from_sizes))
    work = dist.all_to_all_single(filled, whole, from_sizes, to_sizes, group=group, async_op=True)

    def received() -> list[Tensor]:
        pieces = filled.split([length for of_rank in zip(*lengths, strict=True) for length in of_rank])
        return [torch.cat(pieces[place :: len(sent)]).view(x.dtype) for place, x in enumerate(sent)]

    return Collective(work, filled.device, received)


def _parts(request: AllGatherLists | AllToAll) -> tuple[Tensor, list[int], list[int]]:
    """Return what a rank sends, one part for each rank after the other, and the sizes of parts sent and received."""
    if isinstance(request, AllToAll):
        return request.mine, list(request.sizes), list(request.received)
    num_ranks = request.comm.world_size
    return request.mine.repeat(num_ranks), [request.mine.numel()] * num_ranks, list(request.counts)


def _sum(requests: Sequence[AllReduce], group: dist.ProcessGroup | None) -> Collective:
    """Add up over the ranks, in place."""
    whole, received = _in_place([request.mine for request in requests])
    return Collective(dist.all_reduce(whole, group=group, async_op=True), whole.device, received)


def _copy(requests: Sequence[Broadcast], group: dist.ProcessGroup | None) -> Collective:
    """Copy from one rank to all, in place."""
    whole, received = _in_place([request.mine for request in requests])
    work = dist.broadcast(whole, group_src=requests[0].source, group=group, async_op=True)
    return Collective(work, whole.device, received)


def _in_place(vectors: list[Tensor]) -> tuple[Tensor, Callable[[], list[Tensor]]]:
    """Return one vector that travels for several, and what copies it back to them."""
    if len(vectors) == 1:
        return vectors[0], lambda: vectors
    whole = torch.cat([vector.reshape(-1) for vector in vectors])

    def received() -> list[Tensor]:
        parts = whole.split([vector.numel() for vector in vectors])
        for vector, part in zip(vectors, parts, strict=True):
            vector.copy_(part.view(vector.shape))
        return vectors

    return whole, received


def all_gather_single() -> Callable[..., Any]:
    """Return torch's equal-size all-gather under the name that this version has (renamed in torch 2.13)."""
    named: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return named


def _bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes (m,)."""
    return x.view(-1).view(torch.uint8)


def _split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the parts of ``x`` (m,) as bytes."""
    parts: tuple[Tensor, ...] = _bytes_of(x).split([size * x.element_size() for size in sizes])
    return parts


def mean_async(x: Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Start to replace ``x`` by its mean over the ranks, as DDP does where it has no hook; return the future of x."""
    work = dist.all_reduce(x.div_(dist.get_world_size(group)), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
