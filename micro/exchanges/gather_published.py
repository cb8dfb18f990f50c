"""Gather as in public code: all ranks' pairs are cut into equal slices, as if every rank had sent as many."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from micro.exchanges.gather import Gather
from micro.sparse import Overlap, SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGather(Gather):
    """Gather (index, value) pairs and cut them into world_size equal slices, as if every rank had sent as many.

    Where ranks sent unequal numbers, the N mod world_size last of the N pairs are dropped; of two pairs of one index in
    one slice, the first is. Their residuals have lost them all the same, so that mass is not conserved. Bytes as with
    `Gather`.

    Source: public code of Shi et al., arXiv 1911.08772, and of Abdelmoniem et al., SIDCo, MLSys 2021, arXiv 2101.10761.
    Differences: int32 indices, lists padded at most by a quarter, added up in rank order so that all ranks get the
    same bits.
    """

    name: ClassVar[str] = "gather"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    def parts_of_update(
        self, pairs: SparseValues, counts: tuple[int, ...], overlap: Overlap
    ) -> tuple[SparseValues, ...]:
        """Return the equal slices of all ranks' pairs."""
        return tuple(_equal_slices(pairs, len(counts)))


def _equal_slices(pairs: SparseValues, world_size: int) -> Iterator[SparseValues]:
    """Yield the pairs of all ranks cut into as many equal slices, the last of an index's pairs in each slice."""
    size = pairs.indices.numel() // world_size
    places = torch.arange(size, device=pairs.indices.device)
    for start in (size * part for part in range(world_size)):
        unique, group = torch.unique(pairs.indices[start : start + size], return_inverse=True)
        last = places.new_zeros(unique.numel()).scatter_reduce_(0, group, places, "amax")
        yield SparseValues(unique, pairs.values[start + last])
