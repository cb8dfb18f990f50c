"""The collectives in which requests travel over a process group: the only file that starts those of a step.

Requests of one kind that are due at the same time share a collective: rows, and lists that travel as rows, as bytes;
lists of other lengths, as bytes; small sums of one dtype; copies of one source and dtype.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from micro.comm.ranks import travels_padded
from micro.comm.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast, Request, Sending

LARGE_BYTES = 1 << 20  # a sum of this size travels alone: to copy it costs more than a collective
Group = dist.ProcessGroup | None
ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch's equal-size all-gather under the name that this version has (renamed in torch 2.13)."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective under way.

    Attributes:
        requests: those that it carries.
        work: to wait for.
        device: of what it fills.
        received: returns what it has brought to each of them, once it has ended.
    """

    requests: Sequence[Sending]
    work: Any
    device: torch.device
    received: Callable[[], Sequence[Tensor]]


def start(requests: Sequence[Request], group: Group) -> list[Collective]:
    """Start the collectives of these requests, and count them; those of one way share one, the same on all ranks."""
    ways: dict[Hashable, list[Any]] = {}
    for request in requests:
        if isinstance(request, Sending):
            request.count()
            if isinstance(request, AllGatherLists) and not sum(request.counts):
                continue  # nothing travels, which is known everywhere
            together = ways.setdefault(_way_of(request), [])
            request.comm.traffic.num_shared += bool(together)
            together.append(request)
    return [way[0](together, group) for way, together in ways.items()]  # type: ignore[index]


def _way_of(request: Sending) -> Hashable:
    """Return what starts the collective of a request, and what else is equal for requests that share it."""
    if isinstance(request, AllReduce):
        return _sum, request.mine.dtype, request if request.mine.nbytes >= LARGE_BYTES else None
    if isinstance(request, Broadcast):
        return _copy, request.mine.dtype, request.source
    is_row = isinstance(request, AllGather) or (isinstance(request, AllGatherLists) and travels_padded(request.counts))
    return (_gather_rows if is_row else _send_parts,)


def _gather_rows(requests: Sequence[AllGather | AllGatherLists], group: Group) -> Collective:
    """Gather rows: received is (world_size, m) for each, or its lists."""
    rows = [_row(request) for request in requests]
    sent = rows[0] if len(rows) == 1 else torch.cat([_bytes_of(row) for row in rows])
    length, sent = sent.numel(), aligned(sent) if sent.is_cuda else sent
    filled = sent.new_empty((requests[0].comm.world_size, sent.numel()))
    work = ALL_GATHER(filled.view(-1), sent, group=group, async_op=True)

    def received() -> list[Tensor]:
        whole = filled[:, :length].contiguous()
        if len(rows) == 1:
            return [_answer(requests[0], whole)]
        parts = whole.split([row.nbytes for row in rows], dim=1)
        wide = [part.contiguous().view(row.dtype) for part, row in zip(parts, rows, strict=True)]
        return list(map(_answer, requests, wide))

    return Collective(requests, work, filled.device, received)


def aligned(row: Tensor) -> Tensor:
    """Return ``row`` (m,) filled up to a multiple of 16 bytes, which NCCL copies by loads of 16."""
    return torch.nn.functional.pad(row, (0, -row.nbytes % 16 // row.element_size()))


def _row(request: AllGather | AllGatherLists) -> Tensor:
    """Return the row of a rank; a list is filled up to the longest."""
    if isinstance(request, AllGather):
        return request.mine.contiguous()
    return torch.nn.functional.pad(request.mine, (0, max(request.counts) - request.mine.numel()))


def _answer(request: AllGather | AllGatherLists, rows: Tensor) -> Tensor:
    """Return ``rows`` (world_size, m), or of each rank's what was not filled up, one list after the other."""
    if isinstance(request, AllGather) or rows.shape[1] == min(request.counts):
        return rows if isinstance(request, AllGather) else rows.view(-1)
    lists_and_gaps = rows.view(-1).split([size for n in request.counts for size in (n, rows.shape[1] - n)])
    return torch.cat(lists_and_gaps[::2])


def _send_parts(requests: Sequence[AllGatherLists | AllToAll], group: Group) -> Collective:
    """Send each rank its parts: received is (sum(sizes),) for each."""
    sent, to_ranks, from_ranks = zip(*(_parts(request) for request in requests), strict=True)
    if len(requests) == 1:
        filled = sent[0].new_empty(sum(from_ranks[0]))
        work = dist.all_to_all_single(filled, sent[0], from_ranks[0], to_ranks[0], group=group, async_op=True)
        return Collective(requests, work, filled.device, lambda: [filled])
    widths = [x.element_size() for x in sent]
    parts = [_bytes_of(x).split([n * w for n in ns]) for x, ns, w in zip(sent, to_ranks, widths, strict=True)]
    lengths = [[n * w for n in ns] for ns, w in zip(from_ranks, widths, strict=True)]  # of each request, from each rank
    whole = torch.cat([part for to_rank in zip(*parts, strict=True) for part in to_rank])
    to_sizes = [sum(part.numel() for part in to_rank) for to_rank in zip(*parts, strict=True)]
    by_rank = list(zip(*lengths, strict=True))
    filled = whole.new_empty(sum(map(sum, by_rank)))
    work = dist.all_to_all_single(filled, whole, list(map(sum, by_rank)), to_sizes, group=group, async_op=True)

    def received() -> list[Tensor]:
        pieces = filled.split([length for from_rank in by_rank for length in from_rank])
        return [torch.cat(pieces[place :: len(sent)]).view(x.dtype) for place, x in enumerate(sent)]

    return Collective(requests, work, filled.device, received)


def _parts(request: AllGatherLists | AllToAll) -> tuple[Tensor, list[int], list[int]]:
    """Return what a rank sends, one part for each rank after the other, and the sizes of parts sent and received."""
    if isinstance(request, AllToAll):
        return request.mine, list(request.sizes), list(request.received)
    num_ranks = request.comm.world_size
    return request.mine.repeat(num_ranks), [request.mine.numel()] * num_ranks, list(request.counts)


def _sum(requests: Sequence[AllReduce], group: Group) -> Collective:
    """Add up over the ranks, in place."""
    whole, received = _in_place([request.mine for request in requests])
    return Collective(requests, dist.all_reduce(whole, group=group, async_op=True), whole.device, received)


def _copy(requests: Sequence[Broadcast], group: Group) -> Collective:
    """Copy from one rank to all, in place."""
    whole, received = _in_place([request.mine for request in requests])
    work = dist.broadcast(whole, group_src=requests[0].source, group=group, async_op=True)
    return Collective(requests, work, whole.device, received)


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


def _bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes (m,)."""
    return x.view(-1).view(torch.uint8)


def mean_async(x: Tensor, group: Group, num_summands: int) -> torch.futures.Future[Tensor]:
    """Start to replace ``x`` by its mean over the ranks, as DDP does where it has no hook; return the future of x."""
    work = dist.all_reduce(x.div_(num_summands), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def count_of(holds: bool, group: Group, device: torch.device) -> int:
    """Return on how many ranks something holds."""
    flag = torch.tensor([int(holds)], device=device)
    dist.all_reduce(flag, group=group)
    return int(flag)  # host sync: in a join context that asks for it, where nothing is attached
