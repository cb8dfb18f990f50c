"""Gather with the mean over those who sent, as public code of SparseLoCo and DeMo has it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.exchanges.gather import Gather
from micro.sparse import Overlap, SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherBySenders(Gather):
    """Gather (index, value) pairs; an index gets the mean over those ranks that chose it, instead of over all.

    What one of n ranks alone has sent is applied n times as large as with `Gather`, and it leaves that rank's residual
    once: mass is not conserved, and updates are the larger the less the ranks' choices agree. Bytes as with `Gather`.

    Source: the public code of Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706, and of Peng et al., DeMo, 2024, arXiv
    2411.19870. Differences: no median of norms over ranks, to which SparseLoCo's scales the largest down; added up in
    rank order, so that all ranks get the same bits.
    """

    name: ClassVar[str] = "gather"
    rule: ClassVar[str] = "senders"
    is_default: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    def parts_of_update(
        self, pairs: SparseValues, counts: tuple[int, ...], overlap: Overlap
    ) -> tuple[SparseValues, ...]:
        """Return each rank's pairs as their shares of the means over senders."""
        shares = SparseValues(pairs.indices, pairs.values * (len(counts) / _senders(pairs.indices)))
        return Gather.parts_of_update(self, shares, counts, overlap)


def _senders(indices: Tensor) -> Tensor:
    """Return (m,) int64 how often each of ``indices`` (m,) is among them; an accelerator is not read."""
    if not indices.numel():
        return indices.to(torch.int64)
    ordered, places = indices.sort()
    is_first = torch.cat([places.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])
    group = is_first.cumsum(0) - 1
    sizes = torch.zeros_like(places).index_add_(0, group, torch.ones_like(places))
    return torch.empty_like(places).scatter_(0, places, sizes[group])
