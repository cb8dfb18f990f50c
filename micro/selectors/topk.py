"""The selector topk: each rank's k largest magnitudes of the whole vector, of each layer, or of each chunk."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import Target, target_count
from micro.predicted_traffic import Choosing
from micro.selectors import scans
from micro.selectors.base import NoState, Selector, Traits
from micro.selectors.pieces import Pieces, largest_of_each, pieces_at, pieces_of
from micro.values.flat import Layout
from micro.values.sparse import Selection, Step

TopKScope = Literal["model", "layer", "chunk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Selector[NoState]):
    """Select the k largest magnitudes of this rank's accumulator: of the whole vector, of each layer or each chunk.

    Ranks select independently, so the union grows with the number of ranks (build-up): between k and world_size * k
    indices. A rank selects exactly min(k, numel), including zeros if needed; ties go to the lowest index.

    Args:
        scope: 'model' compares all elements of the vector, with DDP those of a bucket. 'layer' selects the same share
            of each parameter, at least one element, so slightly more than k if many parameters are small. 'chunk'
            splits k over runs of neighbouring elements in proportion to their lengths, so no part of the vector is left
            out; counts of whole chunks differ by at most one.
        size: elements of a chunk; only for scope 'chunk'.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3 (without its other parts); Shi
    et al., arXiv 1911.08772, for the theory. Differences: exact selection by a sampled guess and one scan instead of a
    sort. Chunks: Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706, which keeps 64 of 4,096. Differences: chunks are
    runs of the flat vector, of any length (public code: tiles whose sides divide the matrix's, 1 wide if a side is a
    prime above 64).

    Raises:
        ValueError: no such scope, or a size that is less than 1.
    """

    scope: TopKScope = "model"
    size: int = 4096
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        if self.scope not in get_args(TopKScope):
            raise ValueError(f"scope of topk must be one of {', '.join(get_args(TopKScope))}, got '{self.scope}'")
        if self.size < 1:
            raise ValueError(f"size of a chunk of topk must be at least 1, got {self.size}")

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # depends on the scope
        """BY_PARAMETER for scope 'layer'."""
        return Traits.BY_PARAMETER if self.scope == "layer" else Traits.NONE

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return the target with a density for each parameter: rounding down k / numel would fall short of it."""
        if self.scope != "layer" or target.layer_densities is not None:
            return target
        return replace(target, layer_densities=(target.density,) * len(layout.names))

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return this rank's k largest."""
        indices = yield from self._largest(acc, step)
        return Selection(indices, counts=(indices.numel(),) * comm.world_size)

    def _largest(self, acc: Tensor, step: Step) -> Reduction[Tensor]:
        if self.scope == "model":
            return (yield from scans.largest(acc, step.target_count))
        if self.scope == "layer":
            return _of_each_layer(acc, step)
        chunks = step.layout.kept(_chunks, self.size, acc.device)
        return largest_of_each(acc, chunks, shares(chunks, step.target_count))

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return that selection sends nothing, and its count with each layer's share rounded. See Selector."""
        counts = (target_count(density, numel) for numel in layout.numels if numel)
        return Choosing(count=sum(counts) if self.scope == "layer" else None, knows_counts=True)


def _of_each_layer(acc: Tensor, step: Step) -> Tensor:
    numels = step.layout.numels
    densities = step.layer_densities or (step.target_count / acc.numel(),) * len(numels)
    counts = list(map(target_count, densities, numels))
    return largest_of_each(acc, step.layout.kept(_layers, acc.device), counts)


def _layers(layout: Layout, device: torch.device) -> Pieces:
    return pieces_of(layout.numels, device)


def _chunks(layout: Layout, size: int, device: torch.device) -> Pieces:
    edges = [*range(0, layout.numel, size), layout.numel]
    return pieces_at(list(pairwise(edges)), device)


def shares(chunks: Pieces, count: int) -> Tensor:
    """Return the number of indices per chunk (S,) int64 on the CPU, ``count`` in all."""
    upto = chunks.spans * count // chunks.spans[-1, 1]  # below 2^62: both are below 2^31
    return upto[:, 1] - upto[:, 0]
