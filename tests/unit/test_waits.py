"""How often the host waits for an accelerator in a step of each method: on a device that counts it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import micro
from micro import kernels
from micro.comm.lockstep import SimulatedRanks
from micro.comm.loop import Loop, carried_out
from micro.comm.ranks import Comm, Started
from micro.comm.requests import AllReduce, Reduction, known
from micro.exchanges import union
from micro.selectors import scans
from micro.testing import LAYOUT, Case
from micro.values.finite import read
from tests.fake_device import DEVICE, DeviceTensor, Waits, fake_device
from tests.mirrored_ranks import MirroredComm
from tests.products import grid
from tests.recorded_streams import recorded_streams
from tests.sparsifiers import TABLE, Row

STEPS, SETTLED = 6, 4
LONG = micro.Layout(("a", "b"), ((200, 100), (1000,)))  # whose largest are found by a sample and a scan
MOST = {  # waits of a settled step of one bucket, and the rows with so many: the first line that names a row holds
    "*+at?one": 1,
    "oktopk*": 14,
    "topk+oktopk": 11,
    "sidco+p+repaired": 7,
    "gaussiank+*+slices *k+repaired+union dgc*+union reused* dsa+published two_level+split*": 6,
    "gaussiank+repaired sidco+*+repaired dgc+repaired deft+published threshold+gather*": 5,
    "two_level+micro": 5,
    "gaussiank* dgc* threshold gtopk+published dsa split+micro split+two_level*": 4,
    "micro* exdyna* *+micro+* two_level*": 3,
    "topk+union* topk+layers+union topk+layers+by_name chunks* deft* gtopk split*": 2,
    "*": 1,
}


@contextmanager
def on_device() -> Iterator[Waits]:
    """Have plain torch do all work, on the device."""
    with patch.object(kernels, "TRIED", ()), recorded_streams(), torch.no_grad(), fake_device() as waits:
        yield waits


def waits_of(row: Row) -> list[int]:
    """Return the waits of a rank in each step."""
    reducer, ranks = row.make(0.05, 0), SimulatedRanks(row.world_size(2), shares=False)
    case = Case(reducer=reducer, promises=row.promises, world_size=len(ranks.comms), dtype=torch.float32)
    with on_device() as waits:
        for comm in ranks.comms:
            reducer.prepare(comm, DEVICE)
        states = [reducer.start(LAYOUT, case.dtype, DEVICE) for _ in ranks.comms]
        totals = [0.0]
        for step in range(STEPS):
            grads: list[Any] = [DeviceTensor(grad) for grad in case.gradients(step)]
            ranks.carry_out([reducer.step(*each) for each in zip(states, grads, ranks.comms, strict=True)])
            together = waits.seen["read", "read"]  # one for all simulated ranks
            totals.append(together + (waits.seen.total() - together) / len(ranks.comms))
    return [math.ceil(totals[at + 1] - totals[at]) for at in range(STEPS)]


@pytest.mark.slow
@grid(row=TABLE)
def test_a_settled_step_waits_no_more_often_than_the_table_says(row: Row) -> None:
    most = next(number for names, number in MOST.items() if any(fnmatch(row.name, name) for name in names.split()))
    assert max(waits_of(row)[SETTLED:]) <= most


@pytest.mark.slow
@pytest.mark.parametrize("num_buckets", [1, 3])
@pytest.mark.parametrize(
    ("names", "at_once", "with_each"),
    [
        ("dense randomk powersgd fft bf16+union signsgd+gather", 1, 0),
        ("leader topk+gather", 2, 1),
        ("topk+union micro+agreed micro+published exdyna+published", 3, 1),
    ],
)
def test_waits_of_a_step_of_several_buckets(names: str, at_once: int, with_each: int, num_buckets: int) -> None:
    """Where buckets come one by one, one that reads ahead of its last message is read with the round."""
    for row in (row for row in TABLE if row.name in names.split()):
        assert waits_of_buckets(row, num_buckets, at_once=True) == at_once
        assert waits_of_buckets(row, num_buckets, at_once=False) == at_once + with_each * (num_buckets - 1)


def waits_of_buckets(row: Row, num_buckets: int, *, at_once: bool) -> int:
    """Return the most waits of a settled step on a rank that leads in one; all ranks do the same."""
    reducer, comm, totals = row.make(0.05, 0), MirroredComm(row.world_size(4)), [0]
    with on_device() as waits:
        states = [reducer.start(LONG, torch.float32, DEVICE) for _ in range(num_buckets)]
        for step in range(STEPS):
            loop, begun = Loop(), []
            for state in states:
                grad: Any = DeviceTensor(torch.randn(LONG.numel, generator=torch.Generator().manual_seed(step)))
                begun.append(loop.begin(partial(reducer.reduction, state, grad), comm))
                if not at_once:
                    loop.advance()
            for each in begun:
                loop.finish(each).deliver()
            totals.append(waits.seen.total())
    return max(after - before for before, after in pairwise(totals[SETTLED:]))


@pytest.mark.parametrize("last", [False, True])
def test_what_buckets_need_at_the_end_of_a_round_is_one_wait(last: bool) -> None:
    def reduction(size: int, comm: Comm) -> Reduction[list[Any]]:
        total: Any = yield AllReduce(mine=DeviceTensor(torch.full((size,), float(size))), comm=comm, last=last)
        (whole,) = yield from known(total, last=last)
        return [*whole.tolist(), *(yield from known(total.sum(), size, None, last=last)), *(yield from known(7))]

    class Silent(Comm):
        def start(self, requests: Sequence[Any]) -> Started:
            return Started(lambda: [request.mine for request in requests])

    comm, loop = Silent(world_size=2), Loop()
    with on_device() as waits:
        begun = [loop.begin(partial(reduction, size), comm) for size in (1, 2, 3)]
        assert not any(each.is_done for each in begun)
        assert [loop.finish(each) for each in begun] == [
            [1, 1, 1, None, 7],
            [2, 2, 4, 2, None, 7],
            [3, 3, 3, 9, 3, None, 7],
        ]
        assert waits.seen.total() == 2


def test_a_device_reads_what_is_finite_and_whole_numbers_as_they_are() -> None:
    large = torch.tensor([2**53 + 1, -(2**53) - 1])
    ends = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan])
    with on_device() as waits:
        (found,) = read([DeviceTensor(large)])
        assert found.tolist() == large.tolist(), "a float64 holds neither"
        mixed = read([DeviceTensor(large[:1]), None, 3, DeviceTensor(ends), DeviceTensor(ends > 0)])
        assert waits.seen.total() == 2
    assert mixed[1:3] == [None, 3]
    assert repr(mixed[3:]) == repr([ends, ends > 0])


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 1.5, 1e39])
def test_scans_and_unions_equal_those_of_the_host(threshold: float) -> None:
    def on(x: Tensor) -> Iterator[Tensor]:
        yield from carried_out(scans.above(x, threshold), Comm())
        yield from (carried_out(scans.largest(x, k), Comm()) for k in (0, 1, 900, 20_000))
        yield from carried_out(scans.collect(x, 3, 1 << 29, 18), Comm())
        yield carried_out(union.distinct((x * 99).int().abs(), 1000), Comm())

    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    with on_device():
        found: list[Any] = list(on(DeviceTensor(x)))
    assert all(torch.equal(one.values, other) for one, other in zip(found, on(x), strict=True))
