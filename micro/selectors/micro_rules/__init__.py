"""What a rule for MiCRO's threshold is: it searches one rank's slice. `Agreed` stands in micro.selectors.micro."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.predicted_traffic import Calls
from micro.values.sparse import Selection, Step

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Search:
    """One rank's search of one step.

    Attributes:
        slice: this rank's part (m,) of the accumulator, may be empty.
        numel: total length of all slices.
        spans: (start, stop) of all ranks' slices.
        step: equal on all ranks.
        comm: the ranks.
    """

    slice: Tensor
    numel: int
    spans: tuple[tuple[int, int], ...]
    step: Step
    comm: Comm

    def everything(self) -> Selection:
        """Return all indices of the slice, including zeros: at density 1, where all ranks know the counts."""
        indices = torch.arange(*self.spans[self.comm.rank], dtype=torch.int32, device=self.slice.device)
        return Selection(indices, counts=tuple(stop - start for start, stop in self.spans), threshold=0.0)


class ThresholdRule(ABC, Generic[S]):
    """Sets the threshold. The state is equal on all ranks, because it depends only on data that all ranks have."""

    state: ClassVar[type[Any]]

    @abstractmethod
    def search(self, state: S, search: Search) -> Reduction[Selection]:
        """Select from the slice; return indices in the whole vector, all ranks' counts and the threshold."""

    @abstractmethod
    def calls(self, count: int, numel: int) -> Calls:
        """Return the collectives of a steady step that selects ``count`` of ``numel``."""
