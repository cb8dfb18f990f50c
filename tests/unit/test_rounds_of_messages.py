"""How many rounds buckets take that share them, and what an error of one of them does to the others."""

from functools import partial

import pytest
import torch

import micro
from micro.comm.lockstep import SimulatedRanks
from micro.comm.loop import Loop
from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Reduction
from micro.reducers.base import BucketState

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_buckets", [1, 4, 16])
def test_rounds_of_buckets_that_come_one_by_one(num_buckets: int) -> None:
    """One more for each bucket, in place of three; as many as for one bucket where all are there at once."""
    reducer, num_calls = micro.SparseReducer(micro.Micro(), 0.1), 3
    layout = micro.Layout.flat(400)

    def rounds_of_step(comm: Comm, states: list[BucketState], *, at_once: bool) -> int:
        loop, begun = Loop(), []
        for state in states:
            grad = torch.randn(400, generator=torch.Generator().manual_seed(comm.rank))
            comm.begin_step()
            begun.append(loop.begin(partial(reducer.reduction, state, grad), comm))
            if not at_once:
                loop.advance()
        assert all(loop.finish(each).stats.global_count == 40 for each in begun)
        return loop.num_rounds

    def work(comm: Comm) -> list[int]:
        states = [reducer.start(layout, torch.float32, CPU) for _ in range(num_buckets)]
        return [rounds_of_step(comm, states, at_once=at_once) for at_once in (False, True, False, True)][2:]

    for one_by_one, at_once in SimulatedRanks(2).run(work):
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
        loop = Loop()
        begun = [loop.begin(one, comm) for one in (waits, fails, waits)]
        try:
            for each in begun:
                loop.finish(each)
        finally:
            loop.abandon()

    with pytest.raises(LookupError, match=r"^words of its own$"):
        SimulatedRanks(2).run(work)
    assert sorted(ended) == [0, 0, 1, 1]
