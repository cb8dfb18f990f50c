"""Magnitudes in units of each parameter's scale: what is selected, and what is refused."""

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.requests import Reduction
from micro.selectors.base import Selector, Traits
from micro.selectors.scaled import Scaled, ScaledState
from micro.sparse import Overlap, Selection, Step
from micro.zoo.deft import Deft
from tests.products import grid

LAYOUT = micro.Layout(("large", "small"), ((100,), (100,)))
DENSITY, STEPS = 0.1, 8


def gradients(world_size: int, step: int) -> Tensor:
    drawn = torch.randn(world_size, LAYOUT.numel, generator=torch.Generator().manual_seed(step))
    drawn[:, 100:] *= 1e-4
    return drawn


def updated(reducer: micro.SparseReducer) -> dict[str, int]:
    """Return how many elements of each parameter any of a few steps updated."""
    seen = torch.zeros(LAYOUT.numel, dtype=torch.bool)
    with closing(micro.Simulation(reducer, LAYOUT, 3)) as simulation:
        for step in range(STEPS):
            seen |= simulation.step(gradients(3, step)).update != 0
    return {name: int(seen[place].sum()) for name, place in LAYOUT.slices()}


@pytest.mark.parametrize("selector", [micro.Micro(), micro.TopK(), micro.Leader()], ids=lambda each: each.name)
def test_a_parameter_of_small_gradients_is_served_like_one_of_large(selector: micro.Selector) -> None:
    assert updated(micro.SparseReducer(selector, DENSITY))["small"] == 0
    served = updated(micro.SparseReducer(Scaled(selector=selector), DENSITY))
    assert served["small"] == pytest.approx(served["large"], rel=0.3)


def test_ranks_that_share_a_threshold_share_the_scale() -> None:
    reducer = micro.SparseReducer(Scaled(selector=micro.Micro(), memory=0.5), DENSITY)
    first, second = gradients(3, 0), torch.zeros(3, LAYOUT.numel)
    with closing(micro.Simulation(reducer, LAYOUT, 3)) as simulation:
        simulation.step(first)
        saved = [rank["selector"]["squares"] for rank in simulation.state_dict()["ranks"]]
        assert saved[0] == saved[1] == saved[2]
        assert saved[0]["large"] == pytest.approx(float(first[:, :100].double().square().mean()))
        left = torch.stack(simulation.residuals())[:, :100].double().square().mean()
        simulation.step(second)
        now = simulation.state_dict()["ranks"][0]["selector"]["squares"]["large"]
    assert now == pytest.approx(0.5 * saved[0]["large"] + 0.5 * float(left))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfACopy(Selector[Any]):
    """Does what ``inner`` does, and takes no scales: it is given a scaled copy of the vector."""

    inner: Selector[Any]
    overlap = Overlap.DISJOINT

    def start(self) -> Any:
        return self.inner.start()

    def select(self, state: Any, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        assert step.scales is None
        return self.inner.select(state, acc, step, comm)


@grid(
    selector=[micro.Micro(), micro.Micro(slack=0.5), micro.Micro(rule="repaired"), micro.Micro(rule="published")],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
)
def test_thresholds_by_parameter_select_what_a_scaled_copy_does(selector: Selector[Any], dtype: torch.dtype) -> None:
    assert Traits.TAKES_SCALES in selector.traits
    simulations = [
        micro.Simulation(micro.SparseReducer(Scaled(selector=each), DENSITY), LAYOUT, 3, dtype=dtype)
        for each in (selector, _OfACopy(inner=selector))
    ]
    with closing(simulations[0]), closing(simulations[1]):
        for step in range(STEPS):
            grads = gradients(3, step).to(dtype) * (1e-3 if step == STEPS - 2 else 1.0)
            found, expected = (simulation.step(grads).update for simulation in simulations)
            assert torch.equal(found, expected)


def test_scales_follow_their_parameters_into_other_buckets() -> None:
    reducer = micro.SparseReducer(Scaled(selector=micro.Micro()), DENSITY)
    old = reducer.start(LAYOUT, torch.float32, torch.device("cpu"))
    old.selector = ScaledState(old.selector.inner, LAYOUT.names, torch.tensor([4.0, 9.0], dtype=torch.float64))
    for name, square in (("large", 4.0), ("small", 9.0)):
        alone = reducer.rebuild(micro.Layout((name,), ((100,),)), [old], torch.float32, torch.device("cpu"))
        assert alone.selector.by_name == {name: square}


@pytest.mark.parametrize(
    ("selector", "why"),
    [
        (micro.TopK(scope="layer"), "selector topk weighs each parameter itself already: use it without scaled"),
        (Deft(), "selector deft weighs each parameter itself already"),
        (micro.RandomK(), "selector randomk does not look at magnitudes"),
        (micro.Estimated(fit="gaussiank"), "selector gaussiank fits a law to the accumulator as it is"),
    ],
)
def test_selectors_to_which_a_scale_says_nothing_are_refused(selector: micro.Selector, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Scaled(selector=selector)


def test_a_memory_that_never_learns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory of scaled must be in \[0, 1\), got 1"):
        Scaled(selector=micro.Micro(), memory=1.0)
