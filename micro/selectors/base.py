"""The base class of selectors, which choose the indices that a rank sends in a step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Flag, auto
from typing import ClassVar, TypeVar

from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import Target
from micro.parts import NoState, StatefulPart
from micro.predicted_traffic import Choosing
from micro.values.flat import Layout
from micro.values.sparse import Overlap, Selection, SparseValues, Step

__all__ = ["NoState", "Selector", "Step", "Traits"]


S = TypeVar("S")


class Traits(Flag):
    """Properties of a selector that a reducer needs; combined with ``|``. Most selectors have none."""

    NONE = 0
    BY_PARAMETER = auto()  # each parameter has its own density, set by the policy
    ALL_PARAMETERS = auto()  # it compares parameters: meaningless within a single one
    OWN_DENSITY = auto()  # a target density of 1 need not select every index
    UNBIASED = auto()  # the update is scaled so that its expectation is the dense mean
    WANTS_SUMS = auto()  # needs Step.sums, computed while the gradient is added; not within `per_tensor`
    EVERY_INDEX = auto()  # it selects all indices, at density 1: only values are sent
    TAKES_SCALES = auto()  # it applies Step.scales itself, only to what it searches


class Selector(StatefulPart[S], ABC):
    """A rule that chooses indices: a frozen dataclass of settings. Anything that changes between steps is in its state.

    A subclass sets ``name`` (its name in yaml), ``overlap`` if it is not `Overlap.ANY`, and ``traits`` if it has any.
    It implements `select`, and declares the messages of that: in ``sends`` if they are constant, otherwise in `volume`.
    It is found by name if its file is in this folder, in the table of `micro.zoo`, or in an installed package with an
    entry point.
    """

    kind: ClassVar[str] = "selector"
    home: ClassVar[str] = "micro.selectors"
    group: ClassVar[str] = "micro.selectors"
    overlap: ClassVar[Overlap] = Overlap.ANY
    traits: ClassVar[Traits] = Traits.NONE
    sends: ClassVar[Choosing | None] = None

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return the target of this selector, given the policy's; statistics compare with it.

        By default the policy's; a selector that rounds k for each parameter returns the sum.
        """
        return target

    @abstractmethod
    def select(self, state: S, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Yield requests to the other ranks, and return this rank's selection.

        A selector without messages begins with ``yield from ()``, which makes it a generator.

        Args:
            state: this selector's state; may be changed.
            acc: (numel,) gradient + residual. Not modified. Finite.
            step: equal on all ranks.
            comm: the ranks. All make the same requests in the same order.
        """

    def observe(self, state: S, update: Tensor, step: Step, parts: Sequence[SparseValues] | None) -> None:
        """Learn from the step's update, after ``select``; by default do nothing.

        Called in every step, even if all values are sent and nothing is selected.

        Args:
            state: this selector's state; may be changed.
            update: (numel,) the mean update that the optimizer receives, equal on all ranks. Not modified.
            step: as in ``select``.
            parts: their indices cover all nonzero elements of the update; empty if the step was dropped; None: the
                update may be nonzero anywhere.
        """

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the collectives of ``select`` in steady state, and what the ranks know after it.

        Raises:
            ValueError: the selector does not predict it.
        """
        if self.sends is None:
            raise ValueError(f"selector {self.name} does not predict what it sends: implement its method volume")
        return self.sends
