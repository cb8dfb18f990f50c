"""One rank among many that do as it does: what the rank itself computes in a step, without waiting for anybody."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from micro.comm.ranks import Comm, Started
from micro.comm.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast, Request, Sending


class MirroredComm(Comm):
    """Rank 0 of ``world_size`` ranks, of which each other sends what it sends itself, at once.

    What others send is the first list that this rank sends, as long as it expects theirs. Ranks that search slices of
    their own thus appear to have chosen in the same slice: what a step computes takes as long, what comes out means
    nothing.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size)

    def start(self, requests: Sequence[Request]) -> Started:
        for request in requests:
            request.count()
        answers = [mirrored(request, self.world_size) for request in requests]
        return Started(lambda: answers, lambda: True)


def mirrored(request: Request, world_size: int) -> Any:
    """Return the answer where all ranks give what this one does."""
    if not isinstance(request, Sending):
        return request.alone()
    mine = request.mine
    if isinstance(request, AllGather):
        return mine.expand(world_size, -1).contiguous()
    if isinstance(request, AllReduce):
        return mine.mul_(world_size)
    if isinstance(request, Broadcast):
        return mine if request.source == 0 else mine.zero_()
    assert isinstance(request, AllGatherLists | AllToAll)
    lengths = request.counts if isinstance(request, AllGatherLists) else request.received
    sizes = request.sizes if isinstance(request, AllToAll) else [mine.numel()]
    return _repeated(mine[: next(filter(None, sizes), 0)], sum(lengths))


def _repeated(first: Tensor, numel: int) -> Tensor:
    if not first.numel():
        return first.new_zeros(numel)
    whole, rest = divmod(numel, first.numel())
    return torch.cat([*[first] * whole, first[:rest]])
