"""How often the host waits for an accelerator in a step of each method: on a device that counts it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from micro import messages
from micro.comm import Comm, Started
from micro.kernels import table
from micro.lockstep import SimulatedRanks
from micro.requests import AllGather, AllReduce, Reduction, known
from micro.rounds import Rounds
from micro.testing import LAYOUT, Case
from tests.fake_device import DEVICE, DeviceTensor, Waits, fake_device
from tests.products import grid
from tests.recorded_streams import recorded_streams
from tests.sparsifiers import TABLE, Row

STEPS, SETTLED = 6, 4
MOST = {  # waits of a settled step of one bucket, and the rows with so many: the first line that names a row holds
    "*+at?one": 1,
    "per_tensor+micro+agreed": 22,  # each of its layers may search
    "oktopk*": 14,
    "topk+oktopk redsync+published": 11,
    "sidco+p+repaired": 8,
    "gaussiank+*+slices sage*": 7,
    "gaussiank+repaired* sidco+* dgc+repaired* redsync* reused* dsa+published threshold+gather* two_level+split*": 6,
    "gaussiank* dgc* deft+published per_tensor+micro+published two_level+micro": 5,
    "threshold gtopk+published dsa accordion* split+micro split+two_level*": 4,
    "micro* exdyna* *+micro+agreed split+topk* two_level*": 3,
    "topk* chunks* deft* gtopk dct* sparseloco* per_tensor+topk* in_pieces* split*": 2,
    "*": 1,
}


@contextmanager
def on_device() -> Iterator[Waits]:
    """Have plain torch do all work, on the device."""
    with patch.object(table, "TRIED", ()), recorded_streams(), torch.no_grad(), fake_device() as waits:
        yield waits


def waits_of(row: Row) -> list[int]:
    """Return the waits of a rank in each step."""
    reducer, ranks = row.make(0.05, 0), SimulatedRanks(row.world_size(2), shares=False)
    case = Case(reducer=reducer, promises=row.promises, world_size=len(ranks.comms), dtype=torch.float32)
    with on_device() as waits:
        for comm in ranks.comms:
            reducer.prepare(comm, DEVICE)
        states = [reducer.start(LAYOUT, case.dtype, DEVICE) for _ in ranks.comms]
        totals = [0]
        for step in range(STEPS):
            grads: list[Any] = [DeviceTensor(grad) for grad in case.gradients(step)]
            ranks.carry_out([reducer.step(*each) for each in zip(states, grads, ranks.comms, strict=True)])
            totals.append(waits.seen.total())
    return [math.ceil((totals[at + 1] - totals[at]) / len(ranks.comms)) for at in range(STEPS)]


@grid(row=TABLE)
def test_a_settled_step_waits_no_more_often_than_the_table_says(row: Row) -> None:
    most = next(number for names, number in MOST.items() if any(fnmatch(row.name, name) for name in names.split()))
    assert max(waits_of(row)[SETTLED:]) <= most


def test_what_buckets_read_of_one_round_is_one_wait() -> None:
    comm = Comm(world_size=2)

    def gather(filled: Any, mine: Any, **_: Any) -> Any:
        for row in filled.view(2, -1):
            row.copy_(mine)
        return SimpleNamespace()

    with on_device() as waits, patch.object(messages, "ALL_GATHER", gather):
        sent: list[Any] = [DeviceTensor(torch.arange(size, dtype=torch.int32)) for size in (3, 5, 1, 2)]
        requests = [AllGather(mine=mine, read=place != 1, comm=comm) for place, mine in enumerate(sent)]
        (collective,) = messages.start(requests, None)
        answers = [answer for _, answer in collective.answers()]
        assert waits.seen.total() == 1
        assert [answer.device.type for answer in answers] == ["cpu", "cuda", "cpu", "cpu"]
        for answer, mine in zip(answers, sent, strict=True):
            assert answer.tolist() == [mine.tolist()] * 2


def test_what_buckets_need_at_the_end_of_a_round_is_one_wait() -> None:
    def reduction(size: int) -> Reduction[list[float]]:
        total: Any = yield AllReduce(mine=DeviceTensor(torch.full((size,), float(size))), comm=comm)
        return [*(yield from known(total.sum(), size, None)), *(yield from known(7))]

    class Silent(Comm):
        def start(self, requests: Sequence[Any]) -> Started:
            return Started(lambda: [request.mine for request in requests])

    comm, rounds = Silent(world_size=2), Rounds()
    with on_device() as waits:
        begun = [rounds.begin(lambda _, size=size: reduction(size), comm) for size in (1, 2, 3)]
        assert [each() for each in begun] == [[1, 1, None, 7], [4, 2, None, 7], [9, 3, None, 7]]
        assert waits.seen.total() == 1
