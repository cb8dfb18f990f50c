"""The values that travel between selection and exchange."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Overlap(Enum):
    """How the index sets of different ranks relate; known from the selector, not from the data."""

    ANY = "any"  # ranks choose by themselves: sets may share indices
    DISJOINT = "disjoint"  # no index is chosen by two ranks
    SAME = "same"  # every rank already holds the same indices: none need travel


@dataclass(frozen=True, slots=True)
class Selection:
    """What one rank contributes to a step.

    Attributes:
        indices: (k_r,) int32, ascending, unique; k_r may be 0.
        counts: the k_r of every rank where the selection already made them known everywhere, else None.
        threshold: the cut on abs(acc) that was used, where there is one.
        scale: factor on the mean update (1 but for unbiased estimators).
    """

    indices: Tensor
    counts: tuple[int, ...] | None = None
    threshold: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SparseValues:
    """Values at unique indices of a flat vector: ``indices`` (k,) int32, ``values`` (k,)."""

    indices: Tensor
    values: Tensor

    def add_to_(self, vector: Tensor, *, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the values to ``vector`` (numel,) in place."""
        vector.index_add_(0, self.indices, self.values.to(vector.dtype), alpha=alpha)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange achieved.

    Attributes:
        update: parts whose sum is the mean over ranks of all that was sent; the same on every rank.
        sent: what this rank contributed, as the receivers decoded it; ``residual = acc - sent``.
        counts: how many indices each rank chose.
        num_updated: number of distinct indices in the update.
        healthy: False, on all ranks alike, when any rank's gradient held NaN or Inf.
    """

    update: tuple[SparseValues, ...]
    sent: SparseValues
    counts: tuple[int, ...]
    num_updated: int
    healthy: bool


def union(parts: Iterable[Tensor]) -> Tensor:
    """Return the sorted union (K,) int32 of index lists."""
    return torch.unique(torch.cat(list(parts)))
