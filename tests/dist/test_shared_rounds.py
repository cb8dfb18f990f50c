"""Buckets that share rounds of messages on real ranks: the same as one after the other, in fewer collectives."""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.comm.group import GroupComm
from micro.comm.loop import carried_out
from micro.comm.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast, Reduction, Request
from tests.dist.on_ranks import on_ranks
from tests.sparsifiers import TABLE

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]

LAYOUTS = tuple(micro.Layout((f"{place}.weight", f"{place}.bias"), ((5 + place, 24), (7,))) for place in range(4))
DTYPES = (torch.float32, torch.float32, torch.float64)
SHARING = ("topk+gather", "leader", "micro+agreed", "gtopk", "oktopk", "powersgd", "qsgd+union")
ROWS = {row.name: row for row in TABLE if row.name in SHARING}


def gradients(rank: int, step: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(layout.numel, generator=drawn, dtype=torch.float64) for layout in LAYOUTS]


def reduced(name: str, at_once: bool) -> tuple[list[Tensor], list[Any]]:
    """Return the updates of this rank and its residuals; by step and bucket, its statistics."""
    reducer, comm = ROWS[name].make(0.05, 0), GroupComm()
    states = [reducer.start(layout, torch.float64, torch.device("cpu")) for layout in LAYOUTS]
    updates, stats = [], []
    for step in range(3):
        grads = gradients(comm.rank, step)
        groups = [range(len(grads))] if at_once else [[place] for place in range(len(grads))]
        found = [reducer.reduce_buckets_([states[i] for i in g], [grads[i] for i in g], comm) for g in groups]
        stats.append([each for some in found for each in some])
        updates += grads
    return [*updates, *(state.residual.clone() for state in states)], stats


@pytest.mark.parametrize("name", SHARING)
@on_ranks(2)
def test_buckets_that_share_rounds_give_the_bits_and_bytes_of_one_after_the_other(name: str) -> None:
    (shared, stats), (apart, others) = reduced(name, at_once=True), reduced(name, at_once=False)
    assert all(map(torch.equal, shared, apart))
    for mine, theirs in zip(stats, others, strict=True):
        assert [(each.calls, each.bytes_sent) for each in mine] == [(each.calls, each.bytes_sent) for each in theirs]
    together, alone = ([each.num_collectives for each in found[-1]] for found in (stats, others))
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


@on_ranks(3)
def test_requests_of_a_kind_travel_in_one_message() -> None:
    comm = GroupComm()
    shared = carried_out(at_a_time(requests(comm.rank, comm.world_size)), comm)
    assert comm.traffic.num_collectives == 6  # rows, parts, sums and copies of two dtypes; empty lists send nothing
    comm.begin_step()
    alone = [comm.answer(request) for request in requests(comm.rank, comm.world_size)]
    assert comm.traffic.num_collectives == 18
    assert all(map(torch.equal, shared, alone))


@on_ranks(3)
def test_a_debugged_run_names_the_rank_that_requests_something_else() -> None:
    rank = dist.get_rank()
    with patch.dict(os.environ, MICRO_DEBUG="1"):
        comm = GroupComm()
    assert comm.answer(AllReduce(mine=torch.ones(2))).tolist() == [3.0, 3.0]
    for request in (AllReduce(mine=torch.ones(2 + rank // 2)), AllReduce(mine=torch.ones(2, dtype=DTYPES[rank]))):
        with pytest.raises(micro.PeerError, match=r"^rank 2 and ranks 0, 1 .*this rank: AllReduce values"):
            comm.answer(request)
    assert comm.answer(AllGather(mine=torch.ones(1))).tolist() == [[1.0]] * 3


@on_ranks(2)
def test_which_parameters_no_rank_used_is_one_message_for_buckets_that_travel_together() -> None:
    counts = []
    for finds_unused in (False, True):
        layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        model = DistributedDataParallel(layers, bucket_cap_mb=1e-4, find_unused_parameters=finds_unused)
        with micro.attach(model, micro.SparseReducer(micro.TopK(), 0.1), clip=1e9) as attachment:  # all at the end
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(2, 8)).sum().backward()
            assert len(attachment.stats) > 2
            counts.append(attachment.summary.num_collectives)
    assert counts[1] == counts[0] + 1
