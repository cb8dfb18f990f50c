"""What a sparse method has to send in a step in steady state, as its counts."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

from micro.density.base import Target, target_count
from micro.exchanges.base import Exchange
from micro.flat import Layout
from micro.planning.volumes.selection import has_ranges, has_slices, knows_counts
from micro.reducers.sparse import SparseReducer
from micro.selectors.base import Selector
from micro.selectors.topk import TopK
from micro.sparse import Overlap

_KEEPING_K = ("gtopk", "oktopk")  # the update has k indices whatever the ranks chose


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseStep:
    """What a sparse method has to send: of a bucket, or of a piece of it that is exchanged by itself.

    Attributes:
        numel, world_size, dtype: of the bucket or piece and of its accumulator.
        k: target number of indices.
        chosen: by one rank.
        longest: by the rank that chooses most.
        total: distinct indices in the update.
        knows_counts: whether all ranks know how many each chose.
        has_ranges: whether each rank searches one range of its own, so that its indices count from where that begins.
    """

    reducer: SparseReducer
    exchange: Exchange[Any]
    numel: int
    world_size: int
    dtype: torch.dtype
    k: int
    chosen: float
    longest: float
    total: float
    knows_counts: bool
    has_ranges: bool

    @property
    def selector(self) -> Selector[Any]:
        """The reducer's selector."""
        return self.reducer.selector

    @property
    def is_published(self) -> bool:
        """Whether the exchange follows its published rule."""
        return self.exchange.rule_name == "published"

    def indices(self, count: float, span: float) -> float:
        """Return the bytes of ``count`` indices in a range of ``span`` elements."""
        return self.reducer.indices.num_bytes(round(count), max(round(span), 1))

    def values(self, count: float) -> float:
        """Return the bytes of ``count`` encoded values."""
        return self.reducer.codec.num_bytes(round(count), self.dtype)


def step_of(
    reducer: SparseReducer,
    layout: Layout,
    world_size: int,
    dtype: torch.dtype,
    *,
    build_up: float | None,
    local_count: float | None,
    longest_count: float | None,
) -> SparseStep:
    """Return a step of a bucket; ``build_up`` and counts as micro.planning.volumes.volume_of takes them."""
    selector, numel, density = reducer.selector, layout.numel, reducer.density_policy.density
    k = selector.effective_target(Target(density, target_count(density, numel)), layout).count
    total = None if build_up is None else min(build_up * k, numel)
    if selector.overlap is Overlap.ANY:
        chosen = local_count or _by_itself(selector, density, layout, k)
        if total is None:
            total = _union(numel, chosen, world_size)
            total = min(total, k) if reducer.exchange.name in _KEEPING_K else total
    else:
        total = min(k, numel) if total is None else total
        chosen = local_count or (total / world_size if selector.overlap is Overlap.DISJOINT else total)
    return SparseStep(
        reducer=reducer,
        exchange=reducer.exchange,
        numel=numel,
        world_size=world_size,
        dtype=dtype,
        k=k,
        chosen=min(chosen, numel),
        longest=min(longest_count or _longest(selector, chosen, world_size), numel),
        total=total,
        knows_counts=knows_counts(selector),
        has_ranges=has_ranges(selector),
    )


def _by_itself(selector: Selector[Any], density: float, layout: Layout, k: int) -> float:
    """Return how many elements a rank chooses whose target is k."""
    if isinstance(selector, TopK) and selector.scope == "layer":  # rounds within each parameter, k is the bucket's
        return sum(target_count(density, numel) for numel in layout.numels if numel)
    return k


def _longest(selector: Selector[Any], chosen: float, world_size: int) -> float:
    """Return how many the busiest rank is expected to choose, where slices differ by chance: of a multinomial draw."""
    if not has_slices(selector) or world_size == 1:
        return chosen
    spread = math.sqrt(chosen * (1 - 1 / world_size))
    return chosen + spread * NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))


def _union(numel: int, chosen: float, world_size: int) -> float:
    """Return how many distinct indices ranks choose that choose independently of each other."""
    if chosen >= numel:
        return numel
    return numel * -math.expm1(world_size * math.log1p(-chosen / numel))  # exact where chosen is little of numel
