"""Data passed between the parts of a method: step, selection, sparse values, result of an exchange; and slices."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

from micro import kernels
from micro.kernels.sums import Sums
from micro.values.finite import Finite
from micro.values.flat import Layout
from micro.values.scales import ElementScales


class Overlap(Enum):
    """How the index sets of different ranks relate; known from the selector, not from the data."""

    ANY = "any"  # ranks choose by themselves: sets may share indices
    DISJOINT = "disjoint"  # no index is chosen by two ranks
    SAME = "same"  # every rank already holds the same indices: none need travel
    LEADER = "leader"  # one rank chooses for all: its list goes to the others


@dataclass(frozen=True, slots=True)
class Step:
    """What the parts of a method know about the step: the same on every rank, but for what says otherwise.

    Attributes:
        index: number of the step, from 0.
        target_count: k, the number of indices to select over all ranks together (by each rank, for local selectors).
        seed: the run's seed, for shared randomness.
        layout: names and shapes of the flat vector's parameters.
        layer_densities: the target density of each parameter, where the policy sets one for each; else None.
        sums: of this rank's accumulator, which ranks do not share, for a selector that wants them; else None.
        is_finite: whether this rank's gradient was finite, which ranks do not share either.
        scales: of what a selector that takes them compares, the same on ranks that share a threshold; else None.
    """

    index: int
    target_count: int
    seed: int
    layout: Layout
    layer_densities: tuple[float, ...] | None = None
    sums: Sums | None = None
    is_finite: Finite = True
    scales: ElementScales | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """What one rank contributes to a step.

    Attributes:
        indices: (k_r,) int32, unique, ascending; k_r may be 0.
        counts: the k_r of every rank where the selection already made them known everywhere, else None.
        spans: the (start, stop) that each rank chose from, where it was not the whole vector; shortens packed indices.
        threshold: the cut on abs(acc) that was used, where there is one.
        scale: factor on the mean update (1 but for unbiased estimators).
    """

    indices: Tensor
    counts: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    threshold: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SparseValues:
    """Values at unique indices of a flat vector: ``indices`` (k,) int32, ``values`` (k,)."""

    indices: Tensor
    values: Tensor

    def split(self, counts: Sequence[int]) -> "tuple[SparseValues, ...]":
        """Return neighbouring entries, as many each as ``counts`` say."""
        sizes = list(counts)
        return tuple(map(SparseValues, self.indices.split(sizes), self.values.split(sizes)))

    def where(self, keep: Tensor) -> "SparseValues":
        """Return the entries at which ``keep`` (k,) is True."""
        return SparseValues(self.indices[keep], self.values[keep])

    def at(self, entries: Tensor) -> "SparseValues":
        """Return the entries numbered ``entries`` (m,), in that order."""
        return SparseValues(self.indices.index_select(0, entries), self.values.index_select(0, entries))

    def add_to_(self, vector: Tensor, *, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the values to ``vector`` (numel,) in place."""
        kernels.add_at_(vector, self.indices, self.values, alpha=alpha)

    def take_from_(self, vector: Tensor) -> None:
        """Subtract the values from ``vector`` (numel,) in place."""
        kernels.add_at_(vector, self.indices, self.values, alpha=-1.0)

    def clear_in_(self, vector: Tensor) -> None:
        """Set ``vector`` (numel,) to zero at the indices."""
        vector[self.indices] = 0.0


class AllValues(SparseValues):
    """Values (numel,) at every index of a vector: what is done with them needs no indices, made where asked for."""

    def __init__(self, values: Tensor) -> None:
        object.__setattr__(self, "values", values)

    @property
    def indices(self) -> Tensor:
        """All indices, (numel,) int32."""
        return torch.arange(self.values.numel(), dtype=torch.int32, device=self.values.device)

    def add_to_(self, vector: Tensor, *, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the values to ``vector`` (numel,) in place."""
        vector.add_(self.values.to(vector.dtype), alpha=alpha)

    def take_from_(self, vector: Tensor) -> None:
        """Subtract the values from ``vector`` (numel,) in place; of the values themselves nothing is left."""
        if self.values is vector:
            vector.zero_()
        else:
            self.add_to_(vector, alpha=-1.0)

    def clear_in_(self, vector: Tensor) -> None:
        """Set ``vector`` (numel,) to zero."""
        vector.zero_()


class AllLeaving(AllValues):
    """Values at every index, given by the ``rest`` (numel,) that they leave of the vector they are taken from.

    From then on that vector has the memory of the rest.
    """

    def take_from_(self, vector: Tensor) -> None:
        """Make ``vector`` (numel,) the rest."""
        vector.set_(self.values)  # type: ignore[call-overload]  # a tensor is as good as a storage


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange achieved.

    Attributes:
        update: parts whose sum is the mean over ranks of all that was sent; the same on every rank.
        sent: what this rank contributed, as the receivers decoded it; ``residual = acc - sent``.
        counts: how many indices each rank chose.
        num_updated: number of distinct indices in the update.
        is_finite: False, on all ranks alike, when any rank's gradient held NaN or Inf; on an accelerator the flag may
            not have been read yet, nor num_updated.
        overfull: whether a message of fixed capacity, the same on all ranks, did not hold what was to be sent.
    """

    update: tuple[SparseValues, ...]
    sent: SparseValues
    counts: tuple[int, ...]
    num_updated: int | Tensor
    is_finite: Finite
    overfull: bool = False


def joined(parts: Sequence[SparseValues]) -> tuple[SparseValues, list[int]]:
    """Return the entries of one part or more, one after the other, and how many each part has."""
    counts = [part.indices.numel() for part in parts]
    if len(parts) == 1:
        return parts[0], counts
    indices, values = torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
    return SparseValues(indices, values), counts


def summed(parts: Sequence[SparseValues]) -> SparseValues:
    """Return the sum of one part or more: the union of their indices, the values of each added in the order given."""
    return summed_lists(*joined(parts))


def summed_lists(together: SparseValues, counts: list[int]) -> SparseValues:
    """Return the sum of one part or more, which are neighbouring entries of ``together``, as `summed` does."""
    if len(counts) == 1:
        return together
    return SparseValues(*kernels.added(together.indices, together.values, counts))


def equal_slice(numel: int, world_size: int, part: int) -> tuple[int, int]:
    """Return (start, stop) of one of ``world_size`` slices; the first ``numel % world_size`` are one longer."""
    size, longer = divmod(numel, world_size)
    start = part * size + min(part, longer)
    return start, start + size + (part < longer)


@lru_cache(maxsize=256)  # called at every step
def equal_slices(numel: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of all ``world_size`` equal slices in turn."""
    return tuple(equal_slice(numel, world_size, part) for part in range(world_size))


def cyclic(parts: tuple[tuple[int, int], ...], step: int) -> tuple[tuple[int, int], ...]:
    """Return the part of every rank at ``step``, in rank order: each rank has every part once in as many steps."""
    first = step % len(parts)
    return parts[first:] + parts[:first]


def cyclic_slice(numel: int, step: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the slice that ``rank`` searches at ``step``: each rank visits every slice once in ``world_size`` steps.

    Source: Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967 (partition (step + rank) mod world_size).
    """
    return equal_slice(numel, world_size, (step + rank) % world_size)
