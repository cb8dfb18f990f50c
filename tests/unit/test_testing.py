"""check_laws finds what is wrong with a part: each planted fault breaks the law that it should."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import micro
from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Reduction
from micro.parts import NoState
from micro.selectors.base import Selector
from micro.testing import EXACT, Promises, check_laws
from micro.values.sparse import Overlap, Selection, Step

Choose = Callable[[Tensor, Step, Comm], Tensor]


class Faulty(Selector[NoState]):
    """A selector that chooses by a given function, the same on all ranks unless that says otherwise."""

    name: ClassVar[str] = "faulty"
    overlap: ClassVar[Overlap] = Overlap.ANY
    choose: ClassVar[Choose]

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        yield from ()
        return Selection(type(self).choose(acc, step, comm))


def first(acc: Tensor, step: Step, comm: Comm) -> Tensor:
    return torch.arange(min(step.target_count, acc.numel()), dtype=torch.int32)


def impure(acc: Tensor, step: Step, comm: Comm) -> Tensor:
    acc[0] += 1.0
    return first(acc, step, comm)


FAULTS: dict[str, tuple[Choose, str]] = {
    "wide indices": (lambda *given: first(*given).long(), "returned indices of torch.int64, not of int32"),
    "out of range": (lambda *given: first(*given) + given[0].numel(), "returned index .* of .* elements"),
    "twice": (lambda *given: first(*given).repeat(2), "returned an index twice"),
    "descending": (lambda *given: first(*given).flip(0), "returned indices that do not ascend"),
    "a changed accumulator": (impure, "changed the accumulator"),
    "too many": (lambda acc, *_: torch.arange(acc.numel(), dtype=torch.int32), "elements are updated, expected"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_part_is_found(fault: str) -> None:
    choose, message = FAULTS[fault]
    selector = type("Faulty", (Faulty,), {"choose": staticmethod(choose)})
    made: Any = micro.SparseReducer(dataclass(frozen=True)(selector)(), 0.05)
    with pytest.raises(AssertionError, match=message):
        check_laws(made, Promises(band=EXACT, traffic_within=None), world_sizes=(3,))


@pytest.mark.parametrize("feedback", [micro.ErrorFeedback(decay=0.9), micro.MomentumCorrection()])
def test_the_feedback_of_a_wrapped_method_is_known(feedback: micro.Feedback) -> None:
    topk = micro.SparseReducer(micro.TopK(), 0.05, feedback=feedback)
    two_level = micro.TwoLevel(reducer=topk, ranks_per_node=2)
    check_laws(two_level, Promises(ranks_per_node=2, traffic_within=None), world_sizes=(2, 4))


def test_a_method_that_loses_mass_is_found() -> None:
    reducer = micro.SparseReducer(micro.TopK(), 0.05, feedback=micro.NoFeedback())
    with pytest.raises(AssertionError, match=r"ordinary steps, 1 ranks: element .* lost"):
        check_laws(reducer)


def test_a_part_that_states_less_than_it_sends_is_found() -> None:
    class Talking(micro.TopK):
        def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
            yield AllReduce(mine=torch.zeros(1), kind="counts")
            return (yield from micro.TopK.select(self, state, acc, step, comm))

    with pytest.raises(AssertionError, match="traffic, 3 ranks: requests are"):
        check_laws(micro.SparseReducer(Talking(), 0.05), world_sizes=(3,))
