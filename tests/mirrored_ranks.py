"""One rank among many that do as it does: what the rank itself computes in a step, without waiting for anybody."""

import torch
from torch import Tensor

from micro.comm import Comm


class MirroredComm(Comm):
    """Rank 0 of ``world_size`` ranks, of which each other sends what it sends itself, at once.

    What others send is the first list that this rank sends, as long as it expects theirs. Ranks that search slices of
    their own thus appear to have chosen in the same slice: what a step computes takes as long, what comes out means
    nothing.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size)

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        rows.copy_(row.expand_as(rows))

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        size = next(filter(None, sent_sizes), 0)
        if not size:
            received.zero_()
            return
        first = sent[:size]
        whole, rest = divmod(received.numel(), size)
        torch.cat([*[first] * whole, first[:rest]], out=received)

    def _all_reduce_(self, x: Tensor) -> None:
        x.mul_(self.world_size)

    def _broadcast_(self, x: Tensor, source: int) -> None:
        if source != self.rank:
            x.zero_()
