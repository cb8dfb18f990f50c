"""Magnitudes in units of each element's own updates: the scale, where it begins, what it follows, what is refused."""

from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.requests import Reduction, carried_out
from micro.selectors.base import Traits
from micro.selectors.scaled_elements import ScaledElements, ScaledElementsState
from micro.sparse import Overlap, Selection, Step
from tests.products import grid
from tests.saving import through_a_file

LAYOUT = micro.Layout(("large", "small"), ((100,), (100,)))
DENSITY, CPU = 0.1, torch.device("cpu")


def gradients(world_size: int, step: int) -> Tensor:
    drawn = torch.randn(world_size, LAYOUT.numel, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    drawn[:, 100:] *= 1e-4
    return drawn


def reducer_of(selector: micro.Selector, density: float = DENSITY, **settings: float) -> micro.SparseReducer:
    return micro.SparseReducer(ScaledElements(selector=selector, **settings), density)


def simulation_of(reducer: micro.SparseReducer, world_size: int = 3) -> micro.Simulation:
    return micro.Simulation(reducer, LAYOUT, world_size, dtype=torch.float64)


def squares_of(simulation: micro.Simulation) -> list[Tensor]:
    """Return the mean squares (numel,) of each rank."""
    saved = [rank["selector"] for rank in simulation.state_dict()["ranks"]]
    return [(LAYOUT.flatten(selector["roots"]) * selector["factor"]).square() for selector in saved]


@grid(
    selector=[micro.Micro(), micro.Micro(block=16), micro.TopK(), micro.Leader()],
    world_size=[1, 3],
    memory=[0.9, 0.2, 0.0],  # the second makes the roots take in their factor
    settings=[{}, {"exchange": micro.Gather()}, {"feedback": micro.EF21()}],
)
def test_mean_squares_are_those_that_adam_makes_of_the_updates(
    selector: micro.Selector, world_size: int, memory: float, settings: dict[str, Any]
) -> None:
    if "exchange" in settings and selector.overlap is Overlap.LEADER:
        return  # its indices are not gathered
    first = gradients(world_size, 0)
    reducer = replace(reducer_of(selector, memory=memory), **settings)
    with closing(simulation_of(reducer, world_size)) as simulation:
        expected = [first[rank if not_shared(selector) else slice(None)] for rank in range(world_size)]
        expected = [by_parameter(grads.reshape(-1, LAYOUT.numel).square().mean(0)) for grads in expected]
        for step in range(8):
            update = simulation.step(gradients(world_size, step)).update
            expected = [memory * before + (1 - memory) * update.square() for before in expected]
            torch.testing.assert_close(squares_of(simulation), expected)


def not_shared(selector: micro.Selector) -> bool:
    return selector.overlap is not Overlap.DISJOINT


def by_parameter(squares: Tensor) -> Tensor:
    """Return the mean (numel,) over each element's parameter."""
    return torch.cat([squares[place].mean().expand(place.stop - place.start) for _, place in LAYOUT.slices()])


def test_what_is_selected_is_largest_in_units_of_the_scale() -> None:
    with closing(simulation_of(reducer_of(micro.TopK(), memory=0.9), 1)) as simulation:
        simulation.step(gradients(1, 0))
        for step in range(1, 6):
            grads = gradients(1, step)
            acc = simulation.residuals()[0] + grads[0]
            expected = (acc.abs() / (squares_of(simulation)[0].sqrt() + 1e-8)).topk(20).indices
            update = simulation.step(grads).update
            assert update.nonzero().view(-1).tolist() == expected.sort().values.tolist()


@grid(selector=[micro.Micro(), micro.TopK(), micro.Leader()])
def test_a_parameter_of_small_gradients_is_served_like_one_of_large(selector: micro.Selector) -> None:
    seen = torch.zeros(LAYOUT.numel, dtype=torch.bool)
    with closing(simulation_of(reducer_of(selector))) as simulation:
        for step in range(8):
            seen |= simulation.step(gradients(3, step)).update != 0
    assert int(seen[100:].sum()) == pytest.approx(int(seen[:100].sum()), rel=0.3)


def test_ranks_that_share_a_threshold_share_the_scale() -> None:
    with closing(simulation_of(reducer_of(micro.Micro()))) as simulation:
        for step in range(3):
            simulation.step(gradients(3, step))
            squares = squares_of(simulation)
            assert torch.equal(squares[0], squares[1])
            assert torch.equal(squares[0], squares[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfACopy(micro.Selector[Any]):
    """Does what ``inner`` does, and takes no scales: it is given a scaled copy of the vector."""

    inner: micro.Selector[Any]
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
def test_what_is_compared_by_element_is_what_a_scaled_copy_holds(selector: micro.Selector, dtype: torch.dtype) -> None:
    assert Traits.TAKES_SCALES in selector.traits
    simulations = [
        micro.Simulation(reducer_of(each), LAYOUT, 3, dtype=dtype) for each in (selector, _OfACopy(inner=selector))
    ]
    with closing(simulations[0]), closing(simulations[1]):
        for step in range(8):
            grads = gradients(3, step).to(dtype) * (1e-3 if step == 6 else 1.0)
            found, expected = (simulation.step(grads).update for simulation in simulations)
            assert torch.equal(found, expected)


def test_a_message_for_the_scale_is_sent_in_the_first_step_alone() -> None:
    with closing(simulation_of(reducer_of(micro.Micro()))) as simulation:
        calls = [simulation.step(gradients(3, step)).stats[0].num_collectives for step in range(3)]
    with closing(simulation_of(micro.SparseReducer(micro.Micro(), DENSITY))) as simulation:
        without = [simulation.step(gradients(3, step)).stats[0].num_collectives for step in range(3)]
    assert calls[0] == without[0] + 1
    assert calls[1:] == [3, 3]


def test_steps_that_send_all_count_too() -> None:
    """A state that was saved in such a step goes on as one that was not: what is loaded has no vector yet."""
    selector = ScaledElements(selector=micro.Micro(), memory=0.5)
    state = selector.start()
    step = Step(0, 20, 0, LAYOUT)
    selector.observe(state, torch.ones(LAYOUT.numel), step, None)
    assert state.by_name == {}, "nothing was selected yet"
    carried_out(selector.select(state, gradients(1, 0)[0], step, Comm()), Comm())
    loaded = selector.load(through_a_file(selector.save(state)))
    for each in (state, loaded):
        selector.observe(each, torch.full((LAYOUT.numel,), 2.0), step, None)
    assert state.roots is not None
    assert loaded.roots is not None
    assert torch.equal(state.roots, loaded.roots)
    assert state.factor == loaded.factor


def test_a_saved_state_is_not_changed_by_later_steps() -> None:
    with closing(simulation_of(reducer_of(micro.Micro()))) as simulation:
        simulation.step(gradients(3, 0))
        saved = simulation.state_dict()
        before = saved["ranks"][0]["selector"]["roots"]["large"].clone()
        simulation.load_state_dict(saved)
        simulation.step(gradients(3, 1))
        assert torch.equal(saved["ranks"][0]["selector"]["roots"]["large"], before)


def test_scales_follow_their_parameters_into_other_buckets() -> None:
    reducer = reducer_of(micro.Micro())
    old = reducer.start(LAYOUT, torch.float32, CPU)
    pieces = {name: torch.rand(100) for name in LAYOUT.names}
    old.selector = ScaledElementsState(old.selector.inner, pieces)
    turned = micro.Layout(("small", "large"), ((100,), (100,)))
    alone = [micro.Layout((name,), ((100,),)) for name in LAYOUT.names]
    for layout in (turned, *alone):
        state = reducer.rebuild(layout, [old], torch.float32, CPU).selector
        roots = state.of(layout, CPU)
        assert roots is not None
        assert torch.equal(roots, torch.cat([pieces[name] for name in layout.names]))


def test_a_parameter_that_joins_others_begins_with_its_own_scale() -> None:
    selector = ScaledElements(selector=micro.Micro())
    known = torch.rand(100, dtype=torch.float64)
    state = ScaledElementsState(selector.selector.start(), {"small": known})
    acc = gradients(1, 0)[0]
    carried_out(selector.select(state, acc, Step(0, 20, 0, LAYOUT), Comm()), Comm())
    assert torch.equal(state.by_name["small"], known)
    torch.testing.assert_close(state.by_name["large"], acc[:100].square().mean().sqrt().expand(100))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_does_not_count_is_an_update_of_zeros(bad: float) -> None:
    reducer = micro.SparseReducer(ScaledElements(selector=micro.Micro(), memory=0.5), DENSITY, nonfinite="skip")
    with closing(simulation_of(reducer)) as simulation:
        simulation.step(gradients(3, 0))
        before, grads = squares_of(simulation)[0], gradients(3, 1)
        grads[1, 7] = bad
        out = simulation.step(grads)
        assert out.stats[0].skipped
        torch.testing.assert_close(squares_of(simulation)[0], 0.5 * before)


@grid(density=[DENSITY, 1.0])
def test_an_update_that_another_bucket_makes_void_counts_as_zeros(density: float) -> None:
    reducer, comm = reducer_of(micro.Micro(), memory=0.5), Comm()
    state = reducer.start(LAYOUT, torch.float64, CPU)
    carried_out(reducer.reduction(state, gradients(1, 0)[0], comm), comm).deliver()
    roots, factor = state.selector.roots.clone(), state.selector.factor
    reduction = replace(reducer, density=density).reduction(state, gradients(1, 1)[0], comm)
    carried_out(reduction, comm).drop()
    assert torch.equal(state.selector.roots, roots)
    assert state.selector.factor == pytest.approx(factor * 0.5**0.5)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_squares_outside_the_range_of_numbers_leave_a_selection_of_k(scale: float) -> None:
    with closing(micro.Simulation(reducer_of(micro.Micro()), LAYOUT, 3)) as simulation:
        for step in range(4):
            out = simulation.step((gradients(3, step) * scale).float())
            assert out.stats[0].global_count == 20
            assert torch.isfinite(LAYOUT.flatten(simulation.state_dict()["ranks"][0]["selector"]["roots"])).all()


def test_a_parameter_without_a_gradient_at_first_is_preferred_when_it_has_one() -> None:
    with closing(simulation_of(reducer_of(micro.Micro()))) as simulation:
        first = gradients(3, 0)
        first[:, 100:] = 0
        simulation.step(first)
        update = simulation.step(gradients(3, 1)).update
    assert int((update[100:] != 0).sum()) == 20


@pytest.mark.parametrize(
    ("selector", "why"),
    [
        (micro.TopK(scope="layer"), "topk weighs each parameter itself already: use it without scaled_elements"),
        (micro.Scaled(selector=micro.Micro()), "scaled micro weighs each parameter itself already"),
        (micro.RandomK(), "randomk does not look at magnitudes"),
        (micro.Estimated(fit="gaussiank"), "gaussiank fits a law to the accumulator as it is"),
    ],
)
def test_selectors_to_which_a_scale_says_nothing_are_refused(selector: micro.Selector, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ScaledElements(selector=selector)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"memory": 1.0}, r"memory of scaled_elements must be in \[0, 1\), got 1"),
        ({"memory": -0.1}, r"memory of scaled_elements must be in \[0, 1\), got -0.1"),
        ({"eps": 0.0}, "eps of scaled_elements must be positive, got 0"),
        ({"eps": float("inf")}, "eps of scaled_elements must be positive, got inf"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ScaledElements(selector=micro.Micro(), **settings)


def test_within_tensors_a_selector_that_learns_from_updates_is_refused() -> None:
    class Learning(micro.TopK):
        def observe(self, state: object, update: Tensor, step: Step, parts: object) -> None:
            """Learn nothing."""

    with pytest.raises(ValueError, match="learns from the update of the whole vector"):
        micro.PerTensor(selector=Learning())
