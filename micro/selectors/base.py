"""What a selector is: WHICH indices a rank contributes to a step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from torch import Tensor

from micro.comm import Comm
from micro.density.base import Target
from micro.flat import Layout
from micro.parts import NoState, StatefulPart
from micro.requests import Reduction
from micro.sparse import Overlap, Selection, SparseValues, Step

__all__ = ["NoState", "Selector", "Step"]


S = TypeVar("S")


class Selector(StatefulPart[S], ABC):
    """Parameters of a way to choose indices: a frozen dataclass. What changes from step to step is in its state.

    A subclass sets ``name`` (its word in yaml) and ``overlap``, and is found by that name as soon as its file lies in
    this folder.

    ``by_layer`` says that each parameter gets the density that the policy sets for it, ``needs_all`` that selecting
    within one parameter makes no sense, ``follows_density`` that a density of 1 means every index: none is selected
    then, and none travels. ``sends_indices`` says that most selections make all ranks' indices known everywhere, as
    int32, without an exchange. ``wants_sums`` has the sums of the accumulator made while the gradient is added:
    they are in the step, but not within `per_tensor`. ``wants_squares`` has sums of squares by parameter made so.
    ``takes_scales`` compares magnitudes in the scales that a step may have, which need no scaled copy then.
    """

    kind: ClassVar[str] = "selector"
    home: ClassVar[str] = "micro.selectors"
    group: ClassVar[str] = "micro.selectors"
    overlap: ClassVar[Overlap] = Overlap.ANY
    by_layer: ClassVar[bool] = False
    needs_all: ClassVar[bool] = False
    follows_density: ClassVar[bool] = True
    sends_indices: ClassVar[bool] = False
    wants_sums: ClassVar[bool] = False
    wants_squares: ClassVar[bool] = False
    takes_scales: ClassVar[bool] = False

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
