"""Buckets that share rounds of messages on real ranks: the same as one after the other, in fewer collectives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.group_comm import GroupComm
from micro.reducers.base import BucketState
from micro.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast, Reduction, Request, carried_out
from tests.dist.processes import ranks
from tests.sparsifiers import TABLE

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]

NUM_STEPS = 3
LAYOUTS = tuple(micro.Layout((f"{place}.weight", f"{place}.bias"), ((5 + place, 24), (7,))) for place in range(4))
SHARING = ("topk+gather", "leader", "micro+agreed", "micro+slack", "gtopk", "oktopk", "powersgd", "qsgd+union")
ROWS = {row.name: row for row in TABLE if row.name in SHARING}

Reduce = Callable[[micro.Reducer, list[BucketState], list[Tensor], Comm], tuple[micro.StepStats, ...]]


def gradients(rank: int, step: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(layout.numel, generator=drawn, dtype=torch.float64) for layout in LAYOUTS]


def one_by_one(
    reducer: micro.Reducer, states: list[BucketState], grads: list[Tensor], comm: Comm
) -> tuple[micro.StepStats, ...]:
    return tuple(reducer.reduce_buckets_([state], [grad], comm)[0] for state, grad in zip(states, grads, strict=True))


def reduced(name: str, reduce: Reduce) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """Return the updates and residuals of this rank in all steps and, by step and bucket, its statistics."""
    reducer, comm = ROWS[name].make(0.05, 0), GroupComm()
    states = [reducer.start(layout, torch.float64, torch.device("cpu")) for layout in LAYOUTS]
    updates, stats = [], []
    for step in range(NUM_STEPS):
        grads = gradients(comm.rank, step)
        stats.append(reduce(reducer, states, grads, comm))
        updates += grads
    return updates, [state.residual.clone() for state in states], stats


@pytest.mark.parametrize("name", SHARING)
def test_buckets_that_share_rounds_give_the_bits_and_bytes_of_one_after_the_other(name: str) -> None:
    shared = ranks(2).run(reduced, name, micro.Reducer.reduce_buckets_)[1]
    apart = ranks(2).run(reduced, name, one_by_one)[1]
    for mine, theirs in zip((*shared[0], *shared[1]), (*apart[0], *apart[1]), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(shared[2], apart[2], strict=True):
        assert [stats.calls for stats in mine] == [stats.calls for stats in theirs]
        assert [stats.bytes_sent for stats in mine] == [stats.bytes_sent for stats in theirs]
    together, alone = ([stats.num_collectives for stats in found[2][-1]] for found in (shared, apart))
    assert max(alone) <= sum(together) < sum(alone)
    assert sum(together) < 2 * max(alone)


def requests(rank: int, n: int) -> list[Request]:
    """Return two requests of every kind, of several dtypes."""
    counts, sizes = [rank + 1 for rank in range(n)], [1] * n
    made: list[Request] = []
    for dtype in (torch.float64, torch.int32):
        mine = (100 * rank + torch.arange(n)).to(dtype)
        made += [
            AllGather(mine=mine),
            AllGather(mine=mine[:1].clone()),
            AllGatherLists(mine=mine[: rank + 1], counts=counts),
            AllGatherLists(mine=mine, counts=[n] * n),
            AllToAll(mine=mine, sizes=sizes, received=sizes),
            AllReduce(mine=mine.clone()),
            AllReduce(mine=mine.view(1, -1).clone()),
            Broadcast(mine=mine.clone(), source=1),
            Broadcast(mine=mine[:1].clone(), source=1),
            AllGatherLists(mine=mine[:0], counts=[0] * n),
        ]
    return made


def at_a_time(made: list[Request]) -> Reduction[list[Any]]:
    answers: list[Any] = yield made
    return answers


def answers() -> tuple[list[Any], list[Any], int, int]:
    """Return what requests give together, and one by one, and in how many collectives."""
    comm = GroupComm()
    shared = carried_out(at_a_time(requests(comm.rank, comm.world_size)), comm)
    num_shared = comm.traffic.num_collectives
    comm.begin_step()
    alone = [comm.answer(request) for request in requests(comm.rank, comm.world_size)]
    return [x.tolist() for x in shared], [x.tolist() for x in alone], num_shared, comm.traffic.num_collectives


def test_requests_of_a_kind_travel_in_one_message() -> None:
    for shared, alone, num_shared, num_alone in ranks(3).run(answers):
        assert shared == alone
        assert num_alone == 20
        assert num_shared == 8  # rows, parts, sums and copies of two dtypes; two empty lists, which send nothing
