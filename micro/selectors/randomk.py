"""The selector randomk: equal random indices on all ranks, so no indices are sent."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm.ranks import Comm
from micro.comm.requests import Once, Reduction
from micro.predicted_traffic import Choosing
from micro.selectors.base import NoState, Selector, Traits
from micro.values.finite import to_device
from micro.values.randomness import generator
from micro.values.sparse import Overlap, Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK(Selector[NoState]):
    """Select k indices uniformly at random, seeded by (seed, step): equal on all ranks.

    Args:
        unbiased: multiply the update by numel / k, so that its expectation is the dense mean. The variance grows by
            numel / k - 1. Use it without error feedback.

    Source: Stich et al., Sparsified SGD with memory, NeurIPS 2018, arXiv 1809.07599 (rand-k).
    """

    unbiased: bool = False
    name: ClassVar[str] = "randomk"
    sends: ClassVar[Choosing] = Choosing(knows_counts=True)
    overlap: ClassVar[Overlap] = Overlap.SAME

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # depends on the setting
        """UNBIASED if the update is scaled."""
        return Traits.UNBIASED if self.unbiased else Traits.NONE

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return this step's random indices."""
        numel, k = acc.numel(), min(step.target_count, acc.numel())
        drawn = yield Once(work=lambda: draw(numel, k, generator(step.seed, step.index)))
        indices = to_device(drawn, acc.device)
        counts = (k,) * comm.world_size
        return Selection(indices, counts=counts, scale=numel / k if self.unbiased else 1.0)


def draw(numel: int, k: int, randomness: torch.Generator) -> Tensor:
    """Return k distinct indices of [0, numel), ascending (k,) int32, every set equally likely; costs O(k).

    They are the first k distinct ones of a sequence of draws.
    """
    if 4 * k > numel:
        return torch.randperm(numel, generator=randomness)[:k].sort().values.to(torch.int32)
    size = k + k * k // numel + 4 * math.isqrt(k) + 8  # nearly always enough for k distinct ones
    drawn = torch.randint(numel, (size,), generator=randomness, dtype=torch.int32)
    while (found := kernels.first_distinct(drawn, numel, k)).numel() < k:
        more = torch.randint(numel, (size,), generator=randomness, dtype=torch.int32)
        drawn = torch.cat([drawn, more])
    return found
