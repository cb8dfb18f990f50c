"""One rank among many that do as it does: what the rank itself computes in a step, without waiting for anybody."""

import torch
from torch import Tensor

from micro.comm import Comm


class MirroredComm(Comm):
    """Rank 0 of ``world_size`` ranks, of which each other sends what it sends itself, at once.

    Lists that all others send are as long as this rank expects them. Ranks that search slices of their own thus appear
    to have chosen in the same slice: what a step computes takes as long, what comes out means nothing.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size)

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        rows.copy_(row.expand_as(rows))

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        if not sent.numel():
            received.zero_()
            return
        whole, rest = divmod(received.numel(), sent.numel())
        torch.cat([*[sent] * whole, sent[:rest]], out=received)

    def _all_reduce_(self, x: Tensor) -> None:
        x.mul_(self.world_size)

    def _broadcast_(self, x: Tensor, source: int) -> None:
        if source != self.rank:
            x.zero_()
