"""Gather as in public code: all ranks' pairs are cut into equal slices, as if every rank had sent as many."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from micro.exchanges.gather import Gather
from micro.sparse import SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGather(Gather):
    """Gather (index, value) pairs and cut them into world_size equal slices, as if every rank had sent as many.

    Where ranks sent unequal numbers, the N mod world_size last of the N pairs are dropped; of two pairs of one index in
    one slice, the first is. Their residuals have lost them all the same, so that mass is not conserved. Bytes as with
    `Gather`.

    Source: public code of Shi et al., arXiv 1911.08772, and of Abdelmoniem et al., SIDCo, MLSys 2021, arXiv 2101.10761.
    Differences: int32 indices, lists sent unpadded, added up in rank order so that all ranks get the same bits.
    """

    name: ClassVar[str] = "gather"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    def parts_of_update(self, pairs: tuple[SparseValues, ...]) -> tuple[SparseValues, ...]:
        """Return the equal slices of all ranks' pairs."""
        return tuple(_equal_slices(pairs))


def _equal_slices(parts: tuple[SparseValues, ...]) -> Iterator[SparseValues]:
    """Yield the pairs of all ranks cut into as many equal slices, the last of an index's pairs in each slice."""
    indices, values = torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
    size = indices.numel() // len(parts)
    places = torch.arange(size, device=indices.device)
    for start in (size * part for part in range(len(parts))):
        unique, group = torch.unique(indices[start : start + size], return_inverse=True)
        last = places.new_zeros(unique.numel()).scatter_reduce_(0, group, places, "amax")
        yield SparseValues(unique, values[start + last])
