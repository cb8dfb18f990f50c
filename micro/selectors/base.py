"""What a selector is: WHICH indices a rank contributes to a step."""

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
    """What a pipeline has to know of a selector. Several are joined by ``|``; most selectors have none."""

    NONE = 0
    BY_PARAMETER = auto()  # each parameter gets the density that the policy sets for it
    ALL_PARAMETERS = auto()  # it weighs parameters against each other: within one alone it makes no sense
    OWN_DENSITY = auto()  # a target density of 1 does not mean that every index is selected
    UNBIASED = auto()  # the update is scaled, so that its mean over draws is the dense mean
    WANTS_SUMS = auto()  # Step.sums are made while the gradient is added; not within `per_tensor`
    EVERY_INDEX = auto()  # it selects all there are, at a density of 1: values travel without indices
    TAKES_SCALES = auto()  # it scales by Step.scales itself, what it searches alone


class Selector(StatefulPart[S], ABC):
    """A way to choose indices: a frozen dataclass of its settings. What changes from step to step is in its state.

    A subclass sets ``name`` (its word in yaml), ``overlap`` where it is not `Overlap.ANY`, and ``traits`` where it has
    any; it implements `select`, and says what that sends: in ``sends`` where that is always the same, else by `volume`.
    It is found by its name as soon as its file lies in this folder, in the table of
    `micro.zoo`, or in an installed package with an entry point.
    """

    kind: ClassVar[str] = "selector"
    home: ClassVar[str] = "micro.selectors"
    group: ClassVar[str] = "micro.selectors"
    overlap: ClassVar[Overlap] = Overlap.ANY
    traits: ClassVar[Traits] = Traits.NONE
    sends: ClassVar[Choosing | None] = None

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return what this selector aims at where the policy sets ``target``; statistics judge by it.

        Here the same; a selector that rounds k for each parameter returns the sum of these.
        """
        return target

    @abstractmethod
    def select(self, state: S, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Yield what is requested of all ranks, and return what this rank contributes.

        A choice without a message begins with ``yield from ()``, which makes it a generator.

        Args:
            state: this selector's own state; may be changed.
            acc: (numel,) gradient + residual. Not modified. Finite.
            step: the same on all ranks.
            comm: the ranks, all of which make the same requests in the same order.
        """

    def observe(self, state: S, update: Tensor, step: Step, parts: Sequence[SparseValues] | None) -> None:
        """Learn what the update of the step became, after ``select``; here nothing.

        Called in every step, also where all values travel and nothing is selected.

        Args:
            state: this selector's own state; may be changed.
            update: (numel,) the mean update that the optimizer receives, the same on all ranks. Not modified.
            step: as in ``select``.
            parts: whose indices are all at which the update may be other than zero: none where the step was dropped;
                None: it may be anywhere.
        """

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the collectives that ``select`` calls in a step in steady state, and what the ranks know after it.

        Raises:
            ValueError: the selector does not say.
        """
        if self.sends is None:
            raise ValueError(f"what selector {self.name} sends is not known: give it a method volume")
        return self.sends
