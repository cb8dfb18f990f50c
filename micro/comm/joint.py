"""Join requests of several reductions into one message, and split its answer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from micro.comm.requests import AllGather, AllReduce, AllToAll, Broadcast, Sending

Split = Callable[[Tensor], list[Tensor]]
"""Returns the answer to each request, given that of the joint one."""


def joint(requests: Sequence[Any]) -> tuple[Sending, Split]:
    """Return one request for several of one way (see Sending): rows and lists as bytes, sums and copies in a row."""
    first = requests[0]
    if first.way == "rows":
        return _joint_rows(requests)
    if first.way == "parts":
        return _joint_parts(requests)
    vectors = [request.mine for request in requests]
    whole = torch.cat([vector.reshape(-1) for vector in vectors])

    def copied_back(answer: Tensor) -> list[Tensor]:
        for vector, part in zip(vectors, answer.split([vector.numel() for vector in vectors]), strict=True):
            vector.copy_(part.view(vector.shape))
        return vectors

    if isinstance(first, AllReduce):
        return AllReduce(mine=whole, comm=first.comm), copied_back
    return Broadcast(mine=whole, comm=first.comm, source=first.source), copied_back


def _joint_rows(requests: Sequence[Any]) -> tuple[Sending, Split]:
    rows = [request.row() for request in requests]

    def split(answer: Tensor) -> list[Tensor]:
        parts = answer.split([row.nbytes for row in rows], dim=1)
        wide = [part.contiguous().view(row.dtype) for part, row in zip(parts, rows, strict=True)]
        return [request.answer(each) for request, each in zip(requests, wide, strict=True)]

    return AllGather(mine=torch.cat([_bytes_of(row) for row in rows]), comm=requests[0].comm), split


def _joint_parts(requests: Sequence[Any]) -> tuple[Sending, Split]:
    sent, to_ranks, from_ranks = zip(*(request.parts() for request in requests), strict=True)
    widths = [x.element_size() for x in sent]
    parts = [_bytes_of(x).split([n * w for n in ns]) for x, ns, w in zip(sent, to_ranks, widths, strict=True)]
    lengths = [[n * w for n in ns] for ns, w in zip(from_ranks, widths, strict=True)]  # of each request, from each rank
    whole = torch.cat([part for to_rank in zip(*parts, strict=True) for part in to_rank])
    sizes = [sum(part.numel() for part in to_rank) for to_rank in zip(*parts, strict=True)]
    by_rank = list(zip(*lengths, strict=True))

    def split(answer: Tensor) -> list[Tensor]:
        pieces = answer.split([length for from_rank in by_rank for length in from_rank])
        return [torch.cat(pieces[place :: len(sent)]).view(x.dtype) for place, x in enumerate(sent)]

    return AllToAll(mine=whole, comm=requests[0].comm, sizes=sizes, received=list(map(sum, by_rank))), split


def _bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes (m,)."""
    return x.view(-1).view(torch.uint8)
