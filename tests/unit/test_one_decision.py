"""A step counts for all buckets or for none: every method of the table, on simulated ranks."""

import copy
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.lockstep import SimulatedRanks
from micro.reducers.base import BucketState
from tests.products import grid
from tests.sparsifiers import TABLE, Row

LAYOUTS = (
    micro.Layout(("a.weight", "a.bias"), ((8, 16), (8,))),
    micro.Layout(("b.weight",), ((11, 11),)),
    micro.Layout(("c.weight", "c.bias"), ((9, 7), (9,))),
)
CPU = torch.device("cpu")
WORLD_SIZE = 3
DENSITY = 0.05
BAD_RANK, BAD_BUCKET, BAD_INDEX = 1, 1, 30

States = list[list[BucketState]]  # of every rank and bucket


def reducer_of(row: Row, policy: str) -> micro.Reducer:
    return replace(row.make(DENSITY, 0), nonfinite=policy)  # type: ignore[type-var, no-any-return]


def start(reducer: micro.Reducer, world_size: int = WORLD_SIZE) -> States:
    return [[reducer.start(layout, torch.float64, CPU) for layout in LAYOUTS] for _ in range(world_size)]


def gradients(step: int, world_size: int = WORLD_SIZE) -> list[list[Tensor]]:
    randomness = torch.Generator().manual_seed(step)
    return [
        [torch.randn(layout.numel, generator=randomness, dtype=torch.float64) for layout in LAYOUTS]
        for _ in range(world_size)
    ]


def spoiled(step: int, world_size: int) -> list[list[Tensor]]:
    grads = gradients(step, world_size)
    grads[BAD_RANK][BAD_BUCKET][BAD_INDEX] = float("nan")
    return grads


def take(
    group: SimulatedRanks, reducer: micro.Reducer, states: States, grads: list[list[Tensor]]
) -> list[tuple[micro.StepStats, ...] | str]:
    """Reduce a step in place; return every rank's statistics, or its error's words."""

    def work(comm: Comm) -> tuple[micro.StepStats, ...] | str:
        try:
            return reducer.reduce_buckets_(states[comm.rank], grads[comm.rank], comm)
        except micro.NonFiniteGradient as error:
            return str(error)

    return group.run(work)


Pieces = dict[str, dict[str, Tensor]]  # what is kept, by key and by parameter name


def kept_by(node: Sequence[BucketState]) -> Pieces:
    """Return what the ranks of a node keep of a bucket together."""
    if len(node) == 1:
        return node[0].pieces()
    layout = node[0].layout
    return {
        key: {name: torch.stack([layout.split(state.vector(key))[name] for state in node]).sum(0) for name in names}
        for key, names in node[0].pieces().items()
    }


def waiting(reducer: micro.Reducer, node: Sequence[BucketState], grads: Sequence[Tensor]) -> Pieces:
    """Return what the ranks of a node must keep of a bucket where nothing was sent."""
    state, mean, feedback = node[0], torch.stack(list(grads)).mean(0), getattr(reducer, "feedback", None)
    grad = torch.where(torch.isfinite(mean), mean, 0)
    if feedback is not None:
        memory = {key: vector.clone() for key, vector in state.memory.items()}
        feedback.accumulate_(memory, grad, world_size=WORLD_SIZE)
        return BucketState(state.layout, 0, memory).pieces()
    added = state.layout.split(grad)
    return {key: {name: kept + added[name] for name, kept in by.items()} for key, by in kept_by(node).items()}


def assert_same(kept: Pieces, expected: Pieces) -> None:
    assert kept.keys() == expected.keys()
    for key, by_name in expected.items():
        assert kept[key].keys() == by_name.keys()
        assert all(torch.equal(kept[key][name], piece) for name, piece in by_name.items()), key


@grid(row=TABLE, policy=["skip", "stop"])
def test_one_bad_bucket_takes_all_of_them_back_bit_for_bit(row: Row, policy: str) -> None:
    reducer = reducer_of(row, policy)
    world_size, size = row.world_size(WORLD_SIZE), row.ranks_per_node
    states = start(reducer, world_size)
    with closing(SimulatedRanks(world_size)) as group:
        for step in range(2):
            take(group, reducer, states, gradients(step, world_size))
        grads = spoiled(2, world_size)
        of_nodes = [
            (list(zip(*states[first : first + size], strict=True)), zip(*grads[first : first + size], strict=True))
            for first in range(0, world_size, size)
        ]
        expected = [[waiting(reducer, *pair) for pair in zip(*node, strict=True)] for node in of_nodes]
        factors = [[dict(state.factors) for state in mine] for mine in states]
        answers = take(group, reducer, states, grads)
        assert not any(grad.any() for mine in grads for grad in mine)
        for (buckets, _), memories in zip(of_nodes, expected, strict=True):
            for node, memory in zip(buckets, memories, strict=True):
                assert_same(kept_by(node), memory)
        for mine, before in zip(states, factors, strict=True):
            for state, kept in zip(mine, before, strict=True):
                assert all(torch.equal(state.factors[name], factor) for name, factor in kept.items())
        after = gradients(3, world_size)
        good = take(group, reducer, states, after)
    if policy == "stop":
        assert len(set(map(str, answers))) == 1
        assert "'b.weight'" in str(answers[0])
        assert "not finite at step 2" in str(answers[0])
    else:
        assert all(stats.skipped and stats.global_count == 0 for mine in answers for stats in mine)  # type: ignore[union-attr]
    assert all(not stats.skipped and stats.step == 3 for mine in good for stats in mine)  # type: ignore[union-attr]
    for bucket in range(len(LAYOUTS)):
        assert all(torch.equal(after[rank][bucket], after[0][bucket]) for rank in range(world_size))


def saved(reducer: micro.Reducer, states: States) -> Any:
    return copy.deepcopy([[reducer.save(state) for state in mine] for mine in states])


@pytest.mark.slow
@grid(row=TABLE)
def test_a_state_saved_after_a_skipped_step_goes_on_bit_for_bit(row: Row) -> None:
    reducer = reducer_of(row, "skip")
    world_size = row.world_size(WORLD_SIZE)
    states = start(reducer, world_size)
    with closing(SimulatedRanks(world_size)) as group:
        take(group, reducer, states, gradients(0, world_size))
        take(group, reducer, states, spoiled(1, world_size))
        stored = saved(reducer, states)
        loaded = [[reducer.load(bucket, torch.float64, CPU) for bucket in mine] for mine in stored]
        for step in range(2, 5):
            one, other = gradients(step, world_size), gradients(step, world_size)
            take(group, reducer, states, one)
            take(group, reducer, loaded, other)
            for mine, theirs in zip(one, other, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("bad", range(3))
def test_whichever_bucket_is_bad_the_step_is_left_out(bad: int) -> None:
    reducer = micro.SparseReducer(micro.Micro(), 0.2, nonfinite="skip")
    states, grads = start(reducer), gradients(0)
    grads[2][bad][0] = float("inf")
    with closing(SimulatedRanks(WORLD_SIZE)) as group:
        answers = take(group, reducer, states, grads)
    assert all(stats.skipped for mine in answers for stats in mine)  # type: ignore[union-attr]
    assert not any(grad.any() for mine in grads for grad in mine)
