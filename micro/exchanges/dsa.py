"""DSA: every rank adds up one region of the vector, then all gather the sums, as pairs or dense."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from micro.exchanges.equal_regions import EqualRegions, SplitAndGather
from micro.sparse import SparseValues, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class DSA(SplitAndGather):
    """Send every entry to the rank that owns its region, add up there, gather the sums: as pairs, or dense if shorter.

    The vector has world_size equal regions. An index gets the values of only those ranks that chose it, divided by
    all ranks, as with `Gather`, but its sum travels once however many ranks chose it. A codec's rounding stays in the
    residual of the rank that rounds.

    Bytes sent, with int32 indices and values of w bytes: (4 + w) for each of a rank's entries in another rank's
    region; then (n-1) (4 + w) for each distinct index in its own region, or (n-1) w for each element of it; 16 (n-1)
    for lengths, counts and the finite flag.

    Source: the dynamic sparse all-reduce, split and gather, of Renggli et al., SparCML, SC 2019, arXiv 1802.08021.
    Differences: the sums travel dense where that takes fewer bytes in all. `PublishedDSA` is the baseline of the public
    code of Ok-Topk.
    """

    name: ClassVar[str] = "dsa"
    rule: ClassVar[str] = "repaired"
    splits: ClassVar[bool] = True

    def leaving(self, chosen: SparseValues) -> SparseValues:
        """Return all of the choice."""
        return chosen

    def is_dense(self, regions: EqualRegions, counts: list[int], dtype: torch.dtype) -> bool:
        """Return whether the sums take fewer bytes as dense regions than as pairs."""
        wire, sizes = regions.transport.wire, [stop - start for start, stop in regions.spans]
        pairs = sum(
            wire.indices.num_bytes(count, size) + wire.values.num_bytes(count, dtype)
            for count, size in zip(counts, sizes, strict=True)
        )
        return sum(wire.values.num_bytes(size, dtype) for size in sizes) < pairs

    def sent(self, chosen: SparseValues, decoded: list[SparseValues]) -> SparseValues:
        """Return what the receivers decoded."""
        return summed(decoded)
