"""What a rule of MiCRO is given, and what it is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.requests import Reduction
from micro.sparse import Selection, Step
from micro.traffic import Calls

S = TypeVar("S")


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
        """Return all indices of the slice at a density of 1, also those that are zero here; else None.

        Nothing travels, for all ranks know the counts.
        """
        if self.step.target_count < self.numel:
            return None
        indices = torch.arange(*self.spans[self.comm.rank], dtype=torch.int32, device=self.slice.device)
        return Selection(indices, counts=tuple(stop - start for start, stop in self.spans), threshold=0.0)


class ThresholdRule(ABC, Generic[S]):
    """A way to set the threshold. The state is the same on all ranks, because it depends on what all ranks know."""

    state: ClassVar[type[Any]]

    @abstractmethod
    def search(self, state: S, search: Search) -> Reduction[Selection]:
        """Select from the slice, and update the state by what all ranks found; what it requests of them is yielded.

        Indices are those in the vector of all slices; counts and threshold are known.
        """

    @abstractmethod
    def calls(self, count: int, longest: int, numel: int, world_size: int) -> Calls:
        """Return the collectives that ``search`` calls in a step in steady state.

        Args:
            count: target, of ``numel`` elements.
            longest: elements of the longest slice.
        """
