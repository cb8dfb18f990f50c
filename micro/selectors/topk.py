"""Top-k: every rank chooses its own k largest magnitudes, of the whole vector, of each layer, or of each chunk."""

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

    Each rank selects on its own, so the union grows with the number of ranks (build-up): between k and world_size * k
    indices. Exactly min(k, numel) are chosen, zeros included where fewer are non-zero; ties go to the lowest index.

    Args:
        scope: 'model' ranks all elements together; within a bucket of DDP this means the bucket. 'layer' takes the same
            share of each parameter, at least one element of each, so that a little more than k come out where many
            parameters are small. 'chunk' takes k in all from runs of neighbouring elements, which share them in
            proportion to their lengths, so that no part of the vector is left out: those of two whole chunks differ by
            one at most.
        size: elements of a chunk; for scope 'chunk' alone.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3 (without its other parts);
    Shi et al., arXiv 1911.08772, for the theory. Differences: exact selection by a sampled guess and one scan instead
    of a sort. Chunks: Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706, which keeps 64 of 4,096. Differences: chunks
    are runs of the flat vector, so that any length has them; the public code cuts each matrix into tiles whose sides
    divide its own, 1 where a side is prime and above 64.

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
        """Whether each parameter gets a density of its own."""
        return Traits.BY_PARAMETER if self.scope == "layer" else Traits.NONE

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return the target with a density for each parameter, which k / numel, rounded down, would fall short of."""
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
        """Return that choosing sends nothing; each layer rounds its share by itself. See Selector."""
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
    """Return how many each chunk gives (S,) int64 on the CPU, ``count`` in all."""
    upto = chunks.spans * count // chunks.spans[-1, 1]  # below 2^62: both are below 2^31
    return upto[:, 1] - upto[:, 0]
