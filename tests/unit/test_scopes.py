"""What is chosen from and what travels together are two choices: neither changes what the other does."""

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.density.base import target_count
from micro.lockstep import SimulatedRanks
from micro.randomness import seed_for
from micro.reducers.base import BucketState
from micro.selectors.per_tensor import PerTensor
from micro.zoo.accordion import Accordion, AccordionState
from micro.zoo.deft import Deft
from tests.products import grid
from tests.refusals import refused

CPU, DTYPE = torch.device("cpu"), torch.float64
LAYOUT = micro.Layout(("a", "empty", "b", "one", "c"), ((6, 20), (0,), (7,), (), (90,)))
SCALES = {"a": 1.0, "b": 30.0, "one": 0.1, "c": 0.01}
DENSITY = 0.1
SELECTORS = ("exdyna", "leader", "micro", "randomk", "threshold", "topk")


def gradients(layout: micro.Layout, world_size: int, step: int) -> Tensor:
    """Return (world_size, numel) normal gradients that depend on the parameter's name, not on where it lies."""
    drawn = torch.empty(world_size, layout.numel, dtype=DTYPE)
    for name, place in layout.slices():
        randomness = torch.Generator().manual_seed(seed_for(step, name))
        shape = world_size, place.stop - place.start
        drawn[:, place] = SCALES.get(name, 1.0) * torch.randn(shape, generator=randomness, dtype=DTYPE)
    return drawn


def part_of(layout: micro.Layout, *names: str) -> micro.Layout:
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    return micro.Layout(names, tuple(shapes[name] for name in names))


def start(reducer: micro.Reducer, layout: micro.Layout, world_size: int = 3) -> list[BucketState]:
    return [reducer.start(layout, DTYPE, CPU) for _ in range(world_size)]


def reduced(
    group: SimulatedRanks, reducer: micro.Reducer, states: list[BucketState]
) -> tuple[dict[str, Tensor], micro.StepStats]:
    """Take a step; return the update by parameter name, and what rank 0 says of it."""
    grads = gradients(states[0].layout, len(states), states[0].step)

    def work(comm: Comm) -> micro.StepStats:
        comm.begin_step()
        return reducer.reduce_(states[comm.rank], grads[comm.rank], comm)

    stats = group.run(work)
    return states[0].layout.split(grads[0]), stats[0]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def three() -> SimulatedRanks:
    return SimulatedRanks(3)


@grid(name=SELECTORS, world_size=[1, 3])
def test_each_parameter_gets_what_it_would_get_alone(name: str, world_size: int) -> None:
    selector = micro.build(micro.Selector, name)
    reducer = micro.SparseReducer(PerTensor(selector=selector), DENSITY, seed=5)
    together = start(reducer, LAYOUT, world_size)
    parameters = [part_of(LAYOUT, name) for name, numel in zip(LAYOUT.names, LAYOUT.numels, strict=True) if numel]
    apart = [micro.SparseReducer(selector, DENSITY, seed=seed_for(5, layout.names[0])) for layout in parameters]
    alone = [start(one, layout, world_size) for one, layout in zip(apart, parameters, strict=True)]
    group = SimulatedRanks(world_size)
    for _ in range(5):
        update, stats = reduced(group, reducer, together)
        each = [reduced(group, *pair) for pair in zip(apart, alone, strict=True)]
        expected = {name: part for parts, _ in each for name, part in parts.items()}
        assert_same({name: part for name, part in update.items() if part.numel()}, expected)
        assert stats.counts == tuple(map(sum, zip(*(own.counts for _, own in each), strict=True)))
        assert stats.global_count == sum(own.global_count for _, own in each)
        assert stats.target_count == sum(own.target_count for _, own in each)


@pytest.mark.parametrize("name", ["micro", "exdyna", "estimated"])
def test_buckets_change_nothing_and_states_follow_their_parameters(three: SimulatedRanks, name: str) -> None:
    settings = {"micro": {"rule": "repaired"}, "estimated": {"fit": "sidco"}}.get(name, {})
    reducer = micro.SparseReducer(PerTensor(selector={"name": name, **settings}), DENSITY)  # type: ignore[arg-type]
    whole, moved = start(reducer, LAYOUT), [start(reducer, LAYOUT)]
    for step in range(12):
        if step == 4:  # DDP's buckets come apart
            layouts = part_of(LAYOUT, "c", "one"), part_of(LAYOUT, "b", "empty", "a")
            before = reducer.selector.save(moved[0][0].selector)
            moved = [[reducer.rebuild(layout, [old], DTYPE, CPU) for old in moved[0]] for layout in layouts]
            assert reducer.selector.save(moved[0][0].selector) == {name: before[name] for name in ("c", "one")}
        if step == 8:  # and are joined in another order
            turned = micro.Layout(LAYOUT.names[::-1], LAYOUT.shapes[::-1])
            moved = [[reducer.rebuild(turned, old, DTYPE, CPU) for old in zip(*moved, strict=True)]]
        expected, _ = reduced(three, reducer, whole)
        found = {name: part for states in moved for name, part in reduced(three, reducer, states)[0].items()}
        assert_same({name: found[name] for name in LAYOUT.names}, expected)


def test_every_parameter_is_served_whatever_its_scale_by_one_exchange(three: SimulatedRanks) -> None:
    whole = micro.SparseReducer(micro.Micro(), DENSITY)
    each = micro.SparseReducer(PerTensor(selector=micro.TopK()), DENSITY, exchange=micro.Gather())
    starved, _ = reduced(three, whole, start(whole, LAYOUT))
    served, stats = reduced(three, each, start(each, LAYOUT))
    assert not starved["c"].any()
    wanted = {name: target_count(DENSITY, n) if n else 0 for name, n in zip(served, LAYOUT.numels, strict=True)}
    assert all(int(part.count_nonzero()) >= wanted[name] for name, part in served.items())
    assert stats.counts == (sum(wanted.values()),) * 3
    assert [op for op, _ in stats.calls] == ["gather_rows", "gather_lists", "gather_lists"]


def test_a_policy_that_differs_by_layer_goes_with_it(three: SimulatedRanks) -> None:
    reducer = micro.SparseReducer(PerTensor(selector=micro.Leader()), Accordion(density=0.05, high=0.5, interval=100))
    states = start(reducer, part_of(LAYOUT, "a", "b", "c"))
    for state in states:
        state.density, state.step = AccordionState((1.0, 1.0, 1.0), (False, True, False)), 1
    update, stats = reduced(three, reducer, states)
    assert [int(part.count_nonzero()) for part in update.values()] == [6, 3, 4]
    assert stats.target_count == 13
    turned = reducer.rebuild(part_of(LAYOUT, "c", "a", "b"), [states[0]], DTYPE, CPU)
    assert turned.density == AccordionState((1.0, 1.0, 1.0), (False, False, True))
    assert reducer.rebuild(part_of(LAYOUT, "b", "one"), [states[0]], DTYPE, CPU).density == AccordionState()


@pytest.mark.parametrize(
    "selector",
    [Deft(), micro.Everything(), micro.TopK(scope="layer"), PerTensor(selector=micro.TopK())],
    ids=lambda selector: str(selector.full_name),
)
def test_selectors_that_make_no_sense_within_a_parameter_are_refused(selector: micro.Selector) -> None:
    refused(lambda: PerTensor(selector=selector), f"selector {selector.full_name}")
