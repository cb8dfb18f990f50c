"""What is chosen from and what travels together are two choices: neither changes what the other does."""

import pytest
import torch
from torch import Tensor

import micro
from micro.selectors.per_tensor import PerTensor
from micro.values.randomness import seed_for
from tests.parts import normal, simulated
from tests.products import grid

LAYOUT = micro.Layout(("a", "empty", "b", "one", "c"), ((6, 20), (0,), (7,), (), (90,)))
SCALES = {"a": 1.0, "b": 30.0, "one": 0.1, "c": 0.01}
SELECTORS = ("leader", "randomk", "threshold", "topk")


def part_of(layout: micro.Layout, *names: str) -> micro.Layout:
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    return micro.Layout(names, tuple(shapes[name] for name in names))


def step(simulation: micro.Simulation, index: int) -> tuple[dict[str, Tensor], micro.StepStats]:
    """Take a step of gradients that depend on a parameter's name, not on where it lies; update by name, and facts."""
    n, layout = simulation.world_size, simulation.layout
    drawn = [
        SCALES.get(name, 1.0) * normal(n, numel, seed=seed_for(index, name))
        for name, numel in zip(layout.names, layout.numels, strict=True)
    ]
    found = simulation.step(torch.cat(drawn, 1))
    return layout.split(found.update), found.stats[0]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert {name for name in one if one[name].numel()} == {name for name in other if other[name].numel()}
    assert all(torch.equal(one[name], other[name]) for name in one if one[name].numel())


@grid(name=SELECTORS, world_size=[1, 3])
def test_each_parameter_gets_what_it_would_get_alone(name: str, world_size: int) -> None:
    selector = micro.build(micro.Selector, name)
    together = simulated(PerTensor(selector=selector), LAYOUT, world_size, seed=5)
    alone = [
        simulated(selector, part_of(LAYOUT, each), world_size, seed=seed_for(5, each))
        for each, numel in zip(LAYOUT.names, LAYOUT.numels, strict=True)
        if numel
    ]
    for index in range(5):
        update, stats = step(together, index)
        parts = [step(simulation, index) for simulation in alone]
        assert_same(update, {name: part for named, _ in parts for name, part in named.items()})
        assert stats.counts == tuple(map(sum, zip(*(own.counts for _, own in parts), strict=True)))
        assert stats.global_count == sum(own.global_count for _, own in parts)
        assert stats.target_count == sum(own.target_count for _, own in parts)


@pytest.mark.parametrize("fit", ["sidco", "gaussiank"])
def test_buckets_change_nothing_and_states_follow_their_parameters(fit: str) -> None:
    reducer = micro.SparseReducer(PerTensor(selector={"name": "estimated", "fit": fit}), 0.1)
    whole, moved = simulated(reducer, LAYOUT, 3), [simulated(reducer, LAYOUT, 3)]
    for index in range(12):
        if index == 4:  # DDP's buckets come apart
            saved = [[rank] for rank in moved[0].state_dict()["ranks"]]
            layouts = part_of(LAYOUT, "c", "one"), part_of(LAYOUT, "b", "empty", "a")
            moved = [simulated(reducer, layout, 3) for layout in layouts]
            for bucket in moved:
                bucket.load_buckets(saved)
            states = moved[0].state_dict()["ranks"][0]["selector"]
            assert states == {name: saved[0][0]["selector"][name] for name in ("c", "one")}
        if index == 8:  # and are joined in another order
            ranks = list(zip(*(bucket.state_dict()["ranks"] for bucket in moved), strict=True))
            moved = [simulated(reducer, micro.Layout(LAYOUT.names[::-1], LAYOUT.shapes[::-1]), 3)]
            moved[0].load_buckets(ranks)
        found = {name: part for bucket in moved for name, part in step(bucket, index)[0].items()}
        assert_same(found, step(whole, index)[0])
