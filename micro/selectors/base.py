"""What a selector is: WHICH indices a rank contributes to a step."""

from abc import ABC, abstractmethod
from typing import ClassVar, TypeVar

from torch import Tensor

from micro.comm import Comm
from micro.parts import NoState, StatefulPart
from micro.sparse import Overlap, Selection, Step

__all__ = ["NoState", "Selector", "Step"]


S = TypeVar("S")


class Selector(StatefulPart[S], ABC):
    """Parameters of a way to choose indices: a frozen dataclass. What changes from step to step is in its state.

    A subclass sets ``name`` (its word in yaml) and ``overlap``, and is found by that name as soon as its file lies in
    this folder.
    """

    kind: ClassVar[str] = "selector"
    home: ClassVar[str] = "micro.selectors"
    overlap: ClassVar[Overlap] = Overlap.ANY

    @abstractmethod
    def select(self, state: S, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return what this rank contributes.

        Args:
            state: this selector's own state; may be changed.
            acc: (numel,) gradient + residual. Not modified. Finite.
            step: the same on all ranks.
            comm: every rank calls the same collectives in the same order.
        """
