"""Times of a step on a device: events are recorded in it, and the host waits for them where a number is read."""

from collections.abc import Iterator

import pytest
import torch

import micro
from micro.comm.lockstep import SimulatedRanks
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.comm.rounds import all_together
from micro.reducers.outcome import Outcome
from micro.values.flat import Layout
from tests.fake_device import DEVICE, DeviceTensor, fake_device
from tests.recorded_streams import Record, recorded_streams

NUMEL = 60


@pytest.fixture
def record() -> Iterator[Record]:
    with recorded_streams() as found:
        yield found


def waits(record: Record) -> int:
    return [what for what, *_ in record.calls].count("host waits")


def read(seconds: micro.comm.spans.Seconds) -> float:
    """Return the number of events that lie in a span: a stand-in of an event says that each takes a millisecond."""
    return round(1e3 * float(seconds), 6)


def step(reducer: micro.Reducer, comm: Comm) -> Reduction[micro.StepStats]:
    comm.begin_step()
    state = reducer.start(Layout.flat(NUMEL), torch.float32, DEVICE)
    return reducer.step(state, drawn(comm.rank), comm)


def drawn(rank: int) -> DeviceTensor:
    return DeviceTensor(torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)))


@pytest.mark.parametrize("reducer", [micro.SparseReducer(micro.TopK(), 0.1), micro.DenseReducer()])
def test_a_timed_step_waits_as_often_as_one_that_is_not(reducer: micro.Reducer, record: Record) -> None:
    ranks, found = SimulatedRanks(2, shares=False), []
    with torch.no_grad(), fake_device() as counted:
        for timed in (False, True):
            counted.seen.clear()
            for comm in ranks.comms:
                comm.timed = timed
            stats = ranks.carry_out([step(reducer, comm) for comm in ranks.comms])[0]
            found.append(dict(counted.seen))
    assert found[0] == found[1]
    assert waits(record) == 0
    assert stats.exchange_s > 0
    assert stats.rest_s > 0
    assert waits(record) > 0


def test_reductions_that_share_rounds_are_timed_without_each_other(record: Record) -> None:
    def steps(comm: Comm) -> tuple[list[micro.StepStats], int, float]:
        reducer = micro.SparseReducer(micro.TopK(), 0.1)

        def reduction(part: Comm) -> Reduction[Outcome]:
            state = reducer.start(Layout.flat(NUMEL), torch.float32, DEVICE)
            return reducer.reduction(state, drawn(comm.rank), part)

        with torch.no_grad(), fake_device():
            began = comm.now(DEVICE)
            outcomes = all_together([reduction] * 3, iter([comm] * 3), shares=True)
            stats = [outcome.stats for outcome in outcomes]
            return stats, waits(record), comm.now(DEVICE) - began

    with fake_device():
        stats, waited, whole = SimulatedRanks(2, shares=False).run(steps)[0]
    assert waited == 0
    parts = [read(each.select_s + each.exchange_s + each.rest_s) for each in stats]
    assert all(part > 0 for part in parts)
    assert all(each.exchange_s > 0 for each in stats)
    assert sum(parts) <= read(whole)
