"""Record which elements of each parameter arrived in the last step, for optimizers for sparse updates.

A bucket's parameters refer to its state's record of the last step, which is evaluated only on request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from micro.reducers.base import Reducer
from micro.reducers.outcome import Latest
from micro.reducers.quantized import Quantized
from micro.reducers.sparse import SparseReducer
from micro.reducers.wrapping import innermost
from micro.selectors.base import Traits
from micro.values.flat import Layout


@dataclass(frozen=True, slots=True)
class Arrival:
    """What came for one parameter.

    Attributes:
        latest: of the parameter's vector.
        place: of the parameter in it.
        refusal: why sums of gradients are not what comes, in one line; None where they are.
    """

    latest: Latest
    place: slice | None = None
    refusal: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a value came for every element."""
        return self.latest.arrived is None

    def mask(self) -> Tensor:
        """Return for which elements a value came, (numel,) bool in the order of the parameter's memory."""
        assert self.latest.arrived is not None
        assert self.place is not None
        return self.latest.arrived()[self.place]


_last: Any = WeakTensorKeyDictionary()


def arrival_of(parameter: Tensor) -> Arrival | None:
    """Return what came for a parameter with the last step; None where no driver reduces it."""
    found: Arrival | None = _last.get(parameter)
    return found


def note(parameters: Mapping[str, Tensor], layout: Layout, latest: Latest, *, refusal: str | None = None) -> None:
    """Let the ``parameters`` of a vector of this layout refer to what comes for it with each step from now on."""
    for name, place in layout.slices():
        if name in parameters:
            _refer(parameters[name], Arrival(latest, place, refusal))
    latest.is_followed = True


def note_whole(parameters: Mapping[str, Tensor]) -> None:
    """Note that whole gradients come for these parameters from now on."""
    for parameter in parameters.values():
        _refer(parameter, Arrival(Latest()))


def _refer(parameter: Tensor, arrival: Arrival) -> None:
    """Let a parameter refer to this; another vector that has the parameter too, as of a second model, refers anew."""
    before = arrival_of(parameter)
    if before is not None:
        before.latest.is_followed = False
    _last[parameter] = arrival


def refusal(reducer: Reducer) -> str | None:
    """Return why what ``reducer`` sends of an element is not the sum of the gradients since it was last sent."""
    inner = innermost(reducer)
    if not isinstance(inner, SparseReducer | Quantized):
        return None
    feedback = inner.feedback.name
    is_whole = isinstance(inner, Quantized) or Traits.EVERY_INDEX in inner.selector.traits
    if feedback == "none" and is_whole:
        return None  # every gradient is sent
    reasons = {
        "momentum": "sums that carry momentum",
        "none": "one gradient of an element at a time, and nothing of those between",
    }
    return f"feedback {feedback} sends {reasons[feedback]}" if feedback in reasons else None
