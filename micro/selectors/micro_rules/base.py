"""What a rule of MiCRO is given and what it returns."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.interleaving import DealtBlocks
from micro.requests import Reduction
from micro.scales import AnyScales
from micro.sparse import Step
from micro.traffic import Calls

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Search:
    """One rank's search of one step.

    Attributes:
        slice: this rank's part of the accumulator (m,), m may be 0; with ``dealt`` the accumulator.
        numel: the length of all slices together.
        spans: the (start, stop) of all ranks' slices.
        step: the same on all ranks.
        comm: the ranks.
        scales: of the slice, whose elements are compared as if they were scaled; None: as they are.
        dealt: how this rank's part lies in the accumulator, in blocks; None: in a range.
    """

    slice: Tensor
    numel: int
    spans: tuple[tuple[int, int], ...]
    step: Step
    comm: Comm
    scales: AnyScales | None = None
    dealt: DealtBlocks | None = None

    def copied(self) -> "Search":
        """Return the search of a copy of the slice, scaled or put together; where it needs none, itself."""
        if self.dealt is not None:
            return replace(self, slice=self.dealt.slice(self.slice, self.step.index, self.comm.rank), dealt=None)
        return self if self.scales is None else replace(self, slice=self.scales.scaled(self.slice), scales=None)

    @property
    def start(self) -> int:
        """Where this rank's slice begins."""
        return self.spans[self.comm.rank][0]

    @property
    def wants_all(self) -> bool:
        """Whether every element is to be selected, also those that are zero here: other ranks' may not be."""
        return self.step.target_count >= self.numel


@dataclass(frozen=True, slots=True)
class Found:
    """What the search gave.

    Attributes:
        indices: (k_r,) int32, in the vector.
        counts: every rank's k_r.
        threshold: the one that was used.
        all_indices: (sum(counts),) int32 indices in the vector of what all ranks chose, where they are known already.
        overfull: whether they would be, had the message not been too small.
    """

    indices: Tensor
    counts: tuple[int, ...]
    threshold: float
    all_indices: Tensor | None = None
    overfull: bool = False


def everything(search: Search) -> Found:
    """Return all indices of this rank's slice; nothing travels, for all ranks know the counts."""
    start, stop = search.spans[search.comm.rank]
    indices = torch.arange(start, stop, dtype=torch.int32, device=search.slice.device)
    return Found(indices, tuple(stop - start for start, stop in search.spans), 0.0)


class ThresholdRule(ABC, Generic[S]):
    """A way to set the threshold. The state is the same on all ranks, because it depends on what all ranks know."""

    @abstractmethod
    def start(self) -> S:
        """Return the state before the first step."""

    def load(self, saved: dict[str, Any]) -> S:
        """Return the state from its plain form."""
        return type(self.start())(**saved)

    @abstractmethod
    def search(self, state: S, search: Search) -> Reduction[Found]:
        """Select from the slice, and update the state by what all ranks found; what it requests of them is yielded."""

    @abstractmethod
    def calls(self, count: int, longest: int, numel: int, world_size: int) -> Calls:
        """Return the collectives that ``search`` calls in a step in steady state.

        Args:
            count: target, of ``numel`` elements.
            longest: elements of the longest slice.
        """
