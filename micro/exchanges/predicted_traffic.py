"""Predict the selection that an exchange receives; what it sends follows from that."""

import math
from dataclasses import dataclass

import torch

from micro.comm.ranks import PADDING
from micro.exchanges.base import Wire
from micro.predicted_traffic import Bucket, Choosing
from micro.values.sparse import Overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The predicted selection of all ranks in a bucket.

    Attributes:
        numel, world_size, dtype: of the bucket and of its accumulator.
        overlap: how the ranks' index sets relate.
        wire: the codecs of values and indices.
        k: target number of indices.
        chosen: indices chosen by one rank.
        longest: the most chosen by any rank.
        distinct: distinct indices chosen by all ranks.
        updated: indices in the update if known; None: they follow from ``distinct``.
        knows_counts, knows_indices: whether all ranks know how many, and which, each chose.
        has_ranges: whether each rank searches one range, so that its indices are encoded relative to the range's start.
    """

    numel: int
    world_size: int
    dtype: torch.dtype
    overlap: Overlap
    wire: Wire
    k: int
    chosen: float
    longest: float
    distinct: float
    updated: float | None = None
    knows_counts: bool = False
    knows_indices: bool = False
    has_ranges: bool = False

    @classmethod
    def of(cls, bucket: Bucket, choosing: Choosing, overlap: Overlap, k: int, wire: Wire) -> "Choice":
        """Return the expected choice of a selector with target ``k``; measurements of the bucket take precedence."""
        numel, n = bucket.numel, bucket.world_size
        updated = None if bucket.build_up is None else min(bucket.build_up * k, numel)
        chosen, longest = bucket.local_count, bucket.longest_count
        if overlap is Overlap.ANY:
            chosen = (choosing.count or k) if chosen is None else chosen
            distinct = _expected_union(numel, chosen, n)
        else:
            distinct = min(k, numel) if updated is None else updated
            if chosen is None:
                chosen = distinct / n if overlap is Overlap.DISJOINT else distinct
        if longest is None:
            longest = chosen if choosing.searches == "all" else _expected_longest(chosen, n)
        return cls(
            numel=numel,
            world_size=n,
            dtype=bucket.dtype,
            overlap=overlap,
            wire=wire,
            k=k,
            chosen=min(chosen, numel),
            longest=min(longest, numel),
            distinct=distinct,
            updated=updated,
            knows_counts=choosing.knows_counts,
            knows_indices=overlap is Overlap.SAME,
            has_ranges=choosing.searches == "range",
        )

    @property
    def total(self) -> float:
        """Indices in an update with all chosen ones."""
        return self.distinct if self.updated is None else self.updated

    @property
    def kept(self) -> float:
        """Indices in an update with at most k of the chosen ones."""
        return min(self.distinct, self.k) if self.updated is None else self.updated

    @property
    def sent(self) -> float:
        """How many of its chosen elements each rank sends: ``longest`` if lists are padded."""
        is_padded = self.world_size > 2 and self.longest <= PADDING * self.chosen
        return self.longest if is_padded else self.chosen

    def indices(self, count: float, span: float) -> float:
        """Return the bytes of ``count`` indices in a range of ``span`` elements."""
        return self.wire.indices.num_bytes(round(count), max(round(span), 1))

    def values(self, count: float) -> float:
        """Return the bytes of ``count`` encoded values."""
        return self.wire.values.num_bytes(round(count), self.dtype)


def _expected_longest(chosen: float, world_size: int) -> float:
    """Return the expected largest count over ranks, for a multinomial draw."""
    from statistics import NormalDist  # here: it imports fractions and decimals, which nothing else needs

    if world_size == 1:
        return chosen
    spread = math.sqrt(chosen * (1 - 1 / world_size))
    return chosen + spread * NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))


def _expected_union(numel: int, chosen: float, world_size: int) -> float:
    """Return the number of distinct indices if all ranks choose independently."""
    if chosen >= numel:
        return numel
    return numel * -math.expm1(world_size * math.log1p(-chosen / numel))  # exact for small chosen / numel
