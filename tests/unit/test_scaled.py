"""Magnitudes in units of each element's own scale: where it begins, what it follows."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.selectors.base import Selector, Traits
from micro.selectors.scaled_elements import ScaledElements, ScalingState
from micro.values.sparse import Overlap, Selection, Step
from tests import parts
from tests.parts import CPU, normal
from tests.products import grid

LAYOUT = micro.Layout(("large", "small"), ((100,), (100,)))
STEP = Step(0, 20, 0, LAYOUT)
MICRO, TOPK, LEADER = micro.Micro(), micro.TopK(), micro.Leader()


def gradients(world_size: int, step: int) -> Tensor:
    drawn = normal(world_size, LAYOUT.numel, seed=step)
    drawn[:, 100:] *= 1e-4
    return drawn


def simulated(selector: Selector[Any], world_size: int = 3, **parts_: Any) -> micro.Simulation:
    return parts.simulated(selector, LAYOUT, world_size, **parts_)


def squares(simulation: micro.Simulation) -> list[Tensor]:
    """Return the mean squares (numel,) that each rank keeps."""
    saved = [rank["selector"] for rank in simulation.state_dict()["ranks"]]
    return [(LAYOUT.flatten(selector["by_name"]) * selector["factor"]).square() for selector in saved]


def by_parameter(squared: Tensor) -> Tensor:
    """Return the mean (numel,) over each element's parameter."""
    return torch.cat([squared[place].mean().expand(place.stop - place.start) for _, place in LAYOUT.slices()])


@grid(selector=[MICRO, TOPK, LEADER])
def test_a_parameter_of_small_gradients_is_served_like_one_of_large(selector: Selector[Any]) -> None:
    for wrapped in (selector, ScaledElements(selector=selector)):
        seen, simulation = torch.zeros(LAYOUT.numel, dtype=torch.bool), simulated(wrapped)
        for step in range(8):
            seen |= simulation.step(gradients(3, step)).update != 0
        large, small = int(seen[:100].sum()), int(seen[100:].sum())
        assert small == (0 if wrapped is selector else pytest.approx(large, rel=0.3))


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
    selector=[MICRO, micro.Micro(rule="published")],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
)
def test_what_is_compared_by_scale_is_what_a_scaled_copy_holds(selector: Any, dtype: Any) -> None:
    assert Traits.TAKES_SCALES in selector.traits
    one, other = (
        simulated(ScaledElements(selector=each), dtype=dtype) for each in (selector, _OfACopy(inner=selector))
    )
    for step in range(8):
        grads = gradients(3, step).to(dtype) * (1e-3 if step == 6 else 1.0)
        assert torch.equal(one.step(grads).update, other.step(grads).update)


def test_what_is_kept_follows_its_parameter_into_other_buckets() -> None:
    simulation, turned = (
        simulated(ScaledElements(selector=MICRO)),
        micro.Layout(LAYOUT.names[::-1], LAYOUT.shapes[::-1]),
    )
    for step in range(2):
        simulation.step(gradients(3, step))
    before = [rank["selector"] for rank in simulation.state_dict()["ranks"]]
    simulation.rebuild(turned)
    for old, new in zip(before, (rank["selector"] for rank in simulation.state_dict()["ranks"]), strict=True):
        for name in LAYOUT.names:
            assert torch.equal(old["by_name"][name] * old["factor"], new["by_name"][name] * new["factor"])


@grid(
    selector=[MICRO, TOPK, LEADER],
    world_size=[1, 3],
    memory=[0.9, 0.2, 0.0],  # the second makes the roots take in their factor
    settings=[{}, {"exchange": micro.Gather()}],
)
def test_mean_squares_are_those_that_adam_makes_of_the_updates(
    selector: Selector[Any], world_size: int, memory: float, settings: dict[str, Any]
) -> None:
    if "exchange" in settings and selector is LEADER:
        return  # its indices are not gathered
    first, shared = gradients(world_size, 0), selector.overlap is Overlap.DISJOINT
    simulation = simulated(ScaledElements(selector=selector, memory=memory), world_size, **settings)
    seen = [first if shared else first[rank : rank + 1] for rank in range(world_size)]
    expected = [by_parameter(rows.square().mean(0)) for rows in seen]
    for step in range(8):
        update = simulation.step(gradients(world_size, step)).update
        expected = [memory * before + (1 - memory) * update.square() for before in expected]
        torch.testing.assert_close(squares(simulation), expected)
        assert not shared or all(torch.equal(one, squares(simulation)[0]) for one in squares(simulation))


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_an_update_that_another_bucket_makes_void_counts_as_zeros(density: float) -> None:
    reducer, comm = micro.SparseReducer(ScaledElements(selector=MICRO, memory=0.5), 0.1), Comm()
    state = reducer.start(LAYOUT, torch.float64, CPU)
    parts.alone(reducer.reduction(state, gradients(1, 0)[0], comm)).deliver()
    roots, factor = state.selector.joined.clone(), state.selector.factor
    parts.alone(replace(reducer, density=density).reduction(state, gradients(1, 1)[0], comm)).drop()
    assert torch.equal(state.selector.joined, roots)
    assert state.selector.factor == pytest.approx(factor * 0.5**0.5)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_squares_outside_the_range_of_numbers_leave_a_selection_of_k(scale: float) -> None:
    simulation = simulated(ScaledElements(selector=MICRO), dtype=torch.float32)
    for step in range(4):
        assert simulation.step((gradients(3, step) * scale).float()).stats[0].global_count == 20
        roots = simulation.state_dict()["ranks"][0]["selector"]["by_name"]
        assert all(each.isfinite().all() for each in roots.values())


def test_a_parameter_without_a_gradient_at_first_is_preferred_when_it_has_one() -> None:
    simulation, first = simulated(ScaledElements(selector=MICRO)), gradients(3, 0)
    first[:, 100:] = 0
    simulation.step(first)
    assert int((simulation.step(gradients(3, 1)).update[100:] != 0).sum()) == 20


def test_a_parameter_that_joins_begins_with_a_scale_of_its_own() -> None:
    state, acc = ScalingState(MICRO.start(), {"small": torch.rand(100, dtype=torch.float64)}), gradients(1, 0)[0]
    parts.alone(ScaledElements(selector=MICRO).select(state, acc, STEP, Comm()))
    torch.testing.assert_close(state.by_name["large"], acc[:100].square().mean().sqrt().expand(100))


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_beyond_single_precision_are_scales_too(scale: float) -> None:
    """Of the scale of a parameter, and of what a residual forgets."""
    grads = normal(2, 2000, seed=0).float() * torch.tensor([1.0, scale]).repeat_interleave(1000)
    layout = micro.Layout(("a", "b"), ((1000,), (1000,)))
    update = (
        parts.simulated(ScaledElements(selector=micro.TopK(), eps=1e-30), layout, 2, dtype=torch.float32)
        .step(grads)
        .update
    )
    assert min(update[:1000].count_nonzero(), update[1000:].count_nonzero()) > 50
    decaying = {"feedback": micro.ErrorFeedback(decay=0.9), "dtype": torch.float32}
    simulation = parts.simulated(micro.TopK(), 1000, 2, **decaying)
    for _ in range(2):
        stats = simulation.step(grads[:, 1000:]).stats[0]
    assert stats.forgotten == pytest.approx(0.1 * float(grads[0, 1000:].double().norm()), rel=0.5)
