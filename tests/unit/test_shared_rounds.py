"""Buckets that share rounds of messages: the same bits as one after the other, in fewer collectives."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.reducers.base import BucketState
from micro.requests import AllReduce, Reduction
from micro.rounds import Rounds
from micro.thread_ranks import SimulatedGroup
from tests.sparsifiers import TABLE, Row

WORLD_SIZE, NUM_STEPS = 3, 3
LAYOUTS = tuple(micro.Layout((f"{place}.weight", f"{place}.bias"), ((5 + place, 24), (7,))) for place in range(4))
CPU = torch.device("cpu")
SHARING = ("dense", "topk+gather", "leader", "micro+agreed", "micro+slack", "gtopk", "oktopk", "powersgd", "qsgd+union")
ROWS = [row for row in TABLE if row.name in SHARING]

Reduce = Callable[[micro.Reducer, list[BucketState], list[Tensor], Comm], tuple[micro.StepStats, ...]]


def gradients(rank: int, step: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(layout.numel, generator=drawn, dtype=torch.float64) for layout in LAYOUTS]


def one_by_one(
    reducer: micro.Reducer, states: list[BucketState], grads: list[Tensor], comm: Comm
) -> tuple[micro.StepStats, ...]:
    return tuple(reducer.reduce_buckets_([state], [grad], comm)[0] for state, grad in zip(states, grads, strict=True))


def run(reducer: micro.Reducer, reduce: Reduce) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """Return the updates and residuals of rank 1 in all steps and, by step and bucket, its statistics."""

    def work(comm: Comm) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        states = [reducer.start(layout, torch.float64, CPU) for layout in LAYOUTS]
        updates, stats = [], []
        for step in range(NUM_STEPS):
            grads = gradients(comm.rank, step)
            stats.append(reduce(reducer, states, grads, comm))
            updates += grads
        return updates, [state.residual.clone() for state in states], stats

    with closing(SimulatedGroup(WORLD_SIZE)) as group:
        return group.run(work)[1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_buckets_that_share_rounds_give_the_bits_and_bytes_of_one_after_the_other(row: Row) -> None:
    reducer = row.make(0.05, 0)
    shared, apart = run(reducer, micro.Reducer.reduce_buckets_), run(reducer, one_by_one)
    for mine, theirs in zip((*shared[0], *shared[1]), (*apart[0], *apart[1]), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(shared[2], apart[2], strict=True):
        assert [stats.calls for stats in mine] == [stats.calls for stats in theirs]
        assert [stats.bytes_sent for stats in mine] == [stats.bytes_sent for stats in theirs]
    together, alone = ([stats.num_collectives for stats in found[2][-1]] for found in (shared, apart))
    assert max(alone) <= sum(together) < 2 * max(alone)  # more than the least where lists of some buckets are padded
    assert sum(together) < sum(alone)


def test_the_table_has_all_methods_of_this_test() -> None:
    assert len(ROWS) == len(SHARING)


@pytest.mark.parametrize(("slack", "num_calls"), [(None, 3), (0.2, 2)])
@pytest.mark.parametrize("num_buckets", [1, 4, 16])
def test_rounds_of_buckets_that_come_one_by_one(num_buckets: int, slack: float | None, num_calls: int) -> None:
    """One more for each bucket, in place of two or three; as many as for one bucket where all are there at once."""
    reducer = micro.SparseReducer(micro.Micro(slack=slack), 0.1)
    layout = micro.Layout.flat(400)

    def rounds_of_step(comm: Comm, states: list[BucketState], *, at_once: bool) -> int:
        rounds, begun = Rounds(), []
        for state in states:
            grad = torch.randn(400, generator=torch.Generator().manual_seed(comm.rank))
            comm.begin_step()
            begun.append(rounds.begin(partial(reducer.reduction, state, grad), comm))
            if not at_once:
                rounds.advance()
        assert all(each().stats.global_count == 40 for each in begun)
        return rounds.num_rounds

    def work(comm: Comm) -> list[int]:
        states = [reducer.start(layout, torch.float32, CPU) for _ in range(num_buckets)]
        return [rounds_of_step(comm, states, at_once=at_once) for at_once in (False, True, False, True)][2:]

    with closing(SimulatedGroup(2)) as group:
        for one_by_one, at_once in group.run(work):
            assert one_by_one == num_buckets + num_calls - 1
            assert at_once == num_calls


def test_an_error_of_one_bucket_ends_the_others_where_they_are() -> None:
    ended: list[int] = []

    def waits(comm: Comm) -> Reduction[None]:
        try:
            yield AllReduce(mine=torch.ones(1))
            yield AllReduce(mine=torch.ones(1))
        finally:
            ended.append(comm.rank)

    def fails(_: Comm) -> Reduction[None]:
        yield AllReduce(mine=torch.ones(1))
        raise LookupError("words of its own")

    def work(comm: Comm) -> None:
        rounds = Rounds()
        begun = [rounds.begin(one, comm) for one in (waits, fails, waits)]
        try:
            for each in begun:
                each()
        finally:
            rounds.abandon()

    with closing(SimulatedGroup(2)) as group, pytest.raises(LookupError, match=r"^words of its own$"):
        group.run(work)
    assert sorted(ended) == [0, 0, 1, 1]
