"""Chunks: the largest magnitudes of each run of neighbouring elements."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

from torch import Tensor

from micro.comm import Comm
from micro.requests import Reduction
from micro.selectors.base import NoState, Selector
from micro.selectors.pieces import Pieces, largest_of_each, pieces_at
from micro.sparse import Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks(Selector[NoState]):
    """Select the largest magnitudes of each chunk of ``size`` neighbouring elements: no part of the vector is left out.

    Each rank selects on its own, so the union grows with the number of ranks. Exactly k are chosen in all. Chunks share
    them in proportion to their lengths, so that those of two whole chunks differ by one at most and a short last chunk
    has no more than its part; ties go to the lowest index.

    Args:
        size: elements of a chunk.

    Source: the chunks of Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706, which keeps 64 of 4,096: density 1/64.
    Differences: chunks are runs of the flat vector, so that any length has them; the public code cuts each matrix into
    tiles whose sides divide its own, 1 where a side is prime and above 64.

    Raises:
        ValueError: size is less than 1.
    """

    size: int = 4096
    name: ClassVar[str] = "chunks"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size of chunks must be at least 1, got {self.size}")

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return this rank's largest of each chunk."""
        yield from ()
        chunks = _chunks(acc.numel(), self.size, str(acc.device))
        indices = largest_of_each(acc, chunks, shares(chunks, step.target_count))
        return Selection(indices, counts=(indices.numel(),) * comm.world_size)


@lru_cache(maxsize=64)  # needed at every step
def _chunks(numel: int, size: int, device: str) -> Pieces:
    edges = [*range(0, numel, size), numel]
    return pieces_at(tuple(pairwise(edges)), device)


def shares(chunks: Pieces, count: int) -> Tensor:
    """Return how many each chunk gives (S,) int64 on the CPU, ``count`` in all."""
    upto = chunks.on_host * count // chunks.on_host[-1, 1]  # below 2^62: both are below 2^31
    return upto[:, 1] - upto[:, 0]
