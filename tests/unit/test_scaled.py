"""Magnitudes in units of a scale, by parameter or by element: the scale, where it begins, what it follows."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.requests import Reduction, carried_out
from micro.selectors.base import Selector, Traits
from micro.selectors.scaled import Scaled
from micro.selectors.scaled_elements import ScaledElements
from micro.selectors.scaling import ScalingState
from micro.sparse import Overlap, Selection, Step
from micro.zoo.deft import Deft
from tests.products import grid
from tests.saving import through_a_file

LAYOUT = micro.Layout(("large", "small"), ((100,), (100,)))
DENSITY, CPU = 0.1, torch.device("cpu")
STEP = Step(0, 20, 0, LAYOUT)
SCALINGS: list[Any] = [Scaled, ScaledElements]


def gradients(world_size: int, step: int) -> Tensor:
    drawn = torch.randn(world_size, LAYOUT.numel, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    drawn[:, 100:] *= 1e-4
    return drawn


def simulated(
    selector: Selector[Any], world_size: int = 3, dtype: Any = torch.float64, **parts: Any
) -> micro.Simulation:
    return micro.Simulation(micro.SparseReducer(selector, DENSITY, **parts), LAYOUT, world_size, dtype=dtype)


def kept_by(simulation: micro.Simulation) -> list[Tensor]:
    """Return what each rank keeps: mean squares by parameter, or by element."""
    saved = [rank["selector"] for rank in simulation.state_dict()["ranks"]]
    kept = [LAYOUT.flatten(selector["by_name"]) * selector["factor"] for selector in saved]
    return kept if kept[0].numel() == 2 else [roots.square() for roots in kept]


def by_parameter(squares: Tensor) -> Tensor:
    """Return the mean (numel,) over each element's parameter."""
    return torch.cat([squares[place].mean().expand(place.stop - place.start) for _, place in LAYOUT.slices()])


# --- both -------------------------------------------------------------------------------------------------------------


@grid(scaling=SCALINGS, selector=[micro.Micro(), micro.TopK(), micro.Leader()])
def test_a_parameter_of_small_gradients_is_served_like_one_of_large(scaling: Any, selector: Selector[Any]) -> None:
    for wrapped in (selector, scaling(selector=selector)):
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
    scaling=SCALINGS,
    selector=[micro.Micro(), micro.Micro(slack=0.5), micro.Micro(rule="repaired"), micro.Micro(rule="published")],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
)
def test_what_is_compared_by_scale_is_what_a_scaled_copy_holds(
    scaling: Any, selector: Selector[Any], dtype: torch.dtype
) -> None:
    assert Traits.TAKES_SCALES in selector.traits
    simulations = [simulated(scaling(selector=each), dtype=dtype) for each in (selector, _OfACopy(inner=selector))]
    for step in range(8):
        grads = gradients(3, step).to(dtype) * (1e-3 if step == 6 else 1.0)
        found, expected = (simulation.step(grads).update for simulation in simulations)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"selector": micro.TopK(scope="layer")}, "topk weighs each parameter"),
        ({"selector": Deft()}, "deft weighs each parameter"),
        ({"selector": Scaled(selector=micro.Micro())}, "scaled micro weighs each parameter"),
        ({"selector": micro.RandomK()}, "randomk does not look at magnitudes"),
        ({"selector": micro.Estimated(fit="gaussiank")}, "gaussiank fits a law"),
        ({"memory": 1.0}, "memory .* got 1"),
        ({"memory": -0.1}, "memory .* got -0.1"),
        ({"eps": 0.0}, "eps .* got 0"),
        ({"eps": math.inf}, "eps .* got inf"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], why: str) -> None:
    for scaling in SCALINGS:
        if scaling is ScaledElements or "eps" not in settings:
            with pytest.raises(ValueError, match=why):
                scaling(**{"selector": micro.Micro(), **settings})


@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_kept_follows_its_parameter_into_other_buckets(scaling: Any) -> None:
    selector = scaling(selector=micro.Micro())
    reducer = micro.SparseReducer(selector, DENSITY)
    numel = 1 if scaling is Scaled else 100
    pieces = {name: torch.rand(numel, dtype=torch.float64) for name in LAYOUT.names}
    old = reducer.start(LAYOUT, torch.float32, CPU)
    old.selector = ScalingState(old.selector.inner, dict(pieces))
    for names in (("small", "large"), ("large",), ("small",)):
        layout = micro.Layout(names, ((100,),) * len(names))
        kept = reducer.rebuild(layout, [old], torch.float32, CPU).selector.of(layout, CPU)
        assert torch.equal(kept, torch.cat([pieces[name] for name in names]))
    state, acc = ScalingState(micro.Micro().start(), {"small": pieces["small"]}), gradients(1, 0)[0]
    carried_out(selector.select(state, acc, STEP, Comm()), Comm())
    own = acc[:100].square().mean()
    expected = own.view(1) if scaling is Scaled else own.sqrt().expand(100)
    torch.testing.assert_close(state.by_name["large"], expected)  # one that joins begins with its own scale
    assert scaling is Scaled or torch.equal(state.by_name["small"], pieces["small"])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_saved_state_is_not_changed_by_later_steps(scaling: Any) -> None:
    simulation = simulated(scaling(selector=micro.Micro()))
    simulation.step(gradients(3, 0))
    saved = simulation.state_dict()
    before = saved["ranks"][0]["selector"]["by_name"]["large"].clone()
    simulation.load_state_dict(saved)
    simulation.step(gradients(3, 1))
    assert torch.equal(saved["ranks"][0]["selector"]["by_name"]["large"], before)


def test_by_parameter_the_scale_is_a_running_mean_over_all_ranks_that_share_a_threshold() -> None:
    simulation, first = simulated(Scaled(selector=micro.Micro(), memory=0.5)), gradients(3, 0)
    simulation.step(first)
    saved = kept_by(simulation)
    assert torch.equal(saved[0], saved[1])
    assert torch.equal(saved[0], saved[2])
    assert float(saved[0][0]) == pytest.approx(float(first[:, :100].square().mean()))
    left = torch.stack(simulation.residuals())[:, :100].square().mean()
    simulation.step(torch.zeros(3, LAYOUT.numel, dtype=torch.float64))
    assert float(kept_by(simulation)[0][0]) == pytest.approx(0.5 * float(saved[0][0]) + 0.5 * float(left))


# --- by element -------------------------------------------------------------------------------------------------------


@grid(
    selector=[micro.Micro(), micro.Micro(block=16), micro.TopK(), micro.Leader()],
    world_size=[1, 3],
    memory=[0.9, 0.2, 0.0],  # the second makes the roots take in their factor
    settings=[{}, {"exchange": micro.Gather()}, {"feedback": micro.EF21()}],
)
def test_mean_squares_are_those_that_adam_makes_of_the_updates(
    selector: Selector[Any], world_size: int, memory: float, settings: dict[str, Any]
) -> None:
    if "exchange" in settings and selector.overlap is Overlap.LEADER:
        return  # its indices are not gathered
    first, shared = gradients(world_size, 0), selector.overlap is Overlap.DISJOINT
    simulation = simulated(ScaledElements(selector=selector, memory=memory), world_size, **settings)
    expected = [
        by_parameter((first if shared else first[rank : rank + 1]).square().mean(0)) for rank in range(world_size)
    ]
    for step in range(8):
        update = simulation.step(gradients(world_size, step)).update
        expected = [memory * before + (1 - memory) * update.square() for before in expected]
        kept = kept_by(simulation)
        torch.testing.assert_close(kept, expected)
        assert not shared or all(torch.equal(one, kept[0]) for one in kept)


def test_what_is_selected_is_largest_in_units_of_the_scale() -> None:
    simulation = simulated(ScaledElements(selector=micro.TopK(), memory=0.9), 1)
    simulation.step(gradients(1, 0))
    for step in range(1, 6):
        grads = gradients(1, step)
        acc = simulation.residuals()[0] + grads[0]
        expected = (acc.abs() / (kept_by(simulation)[0].sqrt() + 1e-8)).topk(20).indices
        assert simulation.step(grads).update.nonzero().view(-1).tolist() == expected.sort().values.tolist()


def test_a_message_for_the_scale_is_sent_in_the_first_step_alone() -> None:
    scaled, plain = simulated(ScaledElements(selector=micro.Micro())), simulated(micro.Micro())
    calls = [[each.step(gradients(3, step)).stats[0].num_collectives for step in range(3)] for each in (scaled, plain)]
    assert calls[0] == [calls[1][0] + 1, 3, 3]


def test_steps_that_send_all_count_too() -> None:
    """A state that was saved in such a step goes on as one that was not: what is loaded has no vector yet."""
    selector = ScaledElements(selector=micro.Micro(), memory=0.5)
    state = selector.start()
    selector.observe(state, torch.ones(LAYOUT.numel), STEP, None)
    assert state.by_name == {}, "nothing was selected yet"
    carried_out(selector.select(state, gradients(1, 0)[0], STEP, Comm()), Comm())
    loaded = selector.load(through_a_file(selector.save(state)))
    for each in (state, loaded):
        selector.observe(each, torch.full((LAYOUT.numel,), 2.0), STEP, None)
    assert torch.equal(state.joined, loaded.joined)  # type: ignore[arg-type]
    assert state.factor == loaded.factor


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_does_not_count_is_an_update_of_zeros(bad: float) -> None:
    simulation = simulated(ScaledElements(selector=micro.Micro(), memory=0.5), nonfinite="skip")
    simulation.step(gradients(3, 0))
    before, grads = kept_by(simulation)[0], gradients(3, 1)
    grads[1, 7] = bad
    assert simulation.step(grads).stats[0].skipped
    torch.testing.assert_close(kept_by(simulation)[0], 0.5 * before)


@pytest.mark.parametrize("density", [DENSITY, 1.0])
def test_an_update_that_another_bucket_makes_void_counts_as_zeros(density: float) -> None:
    reducer, comm = micro.SparseReducer(ScaledElements(selector=micro.Micro(), memory=0.5), DENSITY), Comm()
    state = reducer.start(LAYOUT, torch.float64, CPU)
    carried_out(reducer.reduction(state, gradients(1, 0)[0], comm), comm).deliver()
    roots, factor = state.selector.joined.clone(), state.selector.factor
    carried_out(replace(reducer, density=density).reduction(state, gradients(1, 1)[0], comm), comm).drop()
    assert torch.equal(state.selector.joined, roots)
    assert state.selector.factor == pytest.approx(factor * 0.5**0.5)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_squares_outside_the_range_of_numbers_leave_a_selection_of_k(scale: float) -> None:
    simulation = simulated(ScaledElements(selector=micro.Micro()), dtype=torch.float32)
    for step in range(4):
        assert simulation.step((gradients(3, step) * scale).float()).stats[0].global_count == 20
        kept = simulation.state_dict()["ranks"][0]["selector"]["by_name"]
        assert all(roots.isfinite().all() for roots in kept.values())


def test_a_parameter_without_a_gradient_at_first_is_preferred_when_it_has_one() -> None:
    simulation, first = simulated(ScaledElements(selector=micro.Micro())), gradients(3, 0)
    first[:, 100:] = 0
    simulation.step(first)
    assert int((simulation.step(gradients(3, 1)).update[100:] != 0).sum()) == 20
