"""What a rule of MiCRO is given, and what it is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.predicted_traffic import Calls
from micro.values.sparse import Selection, Step

S = TypeVar("S")

SHIFT = 20  # a bin is a float32's exponent and its three highest mantissa bits: 6 to 12 % wide
NUM_MAGNITUDE_BINS = 0x7F800000 >> SHIFT  # up to infinity, which is left out


def magnitude_bins(x: Tensor) -> Tensor:
    """Return (NUM_MAGNITUDE_BINS,) int32 counts of ``x`` (m,) by magnitude; zeros, NaN and infinity are not counted."""
    return kernels.magnitude_counts(x, first_bit_pattern=0, shift=SHIFT, num_bins=NUM_MAGNITUDE_BINS)


@dataclass(frozen=True, slots=True)
class Search:
    """One rank's search of one step.

    Attributes:
        slice: what this rank searches (m,), m may be 0: its part of the accumulator.
        numel: the length of all slices together.
        spans: the (start, stop) of all ranks' slices.
        step: the same on all ranks.
        comm: the ranks.
    """

    slice: Tensor
    numel: int
    spans: tuple[tuple[int, int], ...]
    step: Step
    comm: Comm

    @property
    def start(self) -> int:
        """Where this rank's slice begins."""
        return self.spans[self.comm.rank][0]

    def everything(self) -> Selection | None:
        """Return all indices of the slice at a density of 1, zeros too; else None. All ranks know the counts."""
        if self.step.target_count < self.numel:
            return None
        indices = torch.arange(*self.spans[self.comm.rank], dtype=torch.int32, device=self.slice.device)
        return Selection(indices, counts=tuple(stop - start for start, stop in self.spans), threshold=0.0)


class ThresholdRule(ABC, Generic[S]):
    """A way to set the threshold. The state is the same on all ranks, because it depends on what all ranks know."""

    state: ClassVar[type[Any]]

    @abstractmethod
    def search(self, state: S, search: Search) -> Reduction[Selection]:
        """Select from the slice, with indices in the vector of all slices, known counts and the threshold."""

    @abstractmethod
    def calls(self, count: int, numel: int) -> Calls:
        """Return the collectives of a step in steady state that selects ``count`` of ``numel``."""
