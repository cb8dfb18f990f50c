"""Times of a step on a device: the host waits for it where a part begins or ends, or nothing is recorded."""

import math
from collections.abc import Iterator

import pytest
import torch

import micro
from micro.comm.lockstep import SimulatedRanks
from micro.comm.loop import all_together
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.drivers.summary import StepSummary
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


def step(reducer: micro.Reducer, comm: Comm) -> Reduction[micro.StepStats]:
    comm.begin_step()
    state = reducer.start(Layout.flat(NUMEL), torch.float32, DEVICE)
    return reducer.step(state, drawn(comm.rank), comm)


def drawn(rank: int) -> DeviceTensor:
    return DeviceTensor(torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)))


@pytest.mark.parametrize("reducer", [micro.SparseReducer(micro.TopK(), 0.1), micro.DenseReducer()])
def test_a_step_that_is_not_timed_waits_for_no_time_and_has_none(reducer: micro.Reducer, record: Record) -> None:
    waited = []
    with torch.no_grad(), fake_device():
        for timed in (False, True):
            ranks = SimulatedRanks(2, shares=False)
            for comm in ranks.comms:
                comm.timed = timed
            stats = ranks.carry_out([step(reducer, comm) for comm in ranks.comms])[0]
            waited.append(waits(record))
            times = [stats.select_s, stats.exchange_s, stats.rest_s]
            names = {name for name in StepSummary((stats,), math.nan).numbers() if name.endswith("_s")}
            if timed:
                assert min(times) >= 0
                assert stats.exchange_s > 0
                assert stats.rest_s > 0
                assert names == {"select_s", "exchange_s", "rest_s"}
            else:
                assert all(map(math.isnan, times[1:]))
                assert not names - {"select_s"}
    assert waited[0] == 0 < waited[1]


def test_reductions_that_share_rounds_are_timed_without_each_other(record: Record) -> None:
    def steps(comm: Comm) -> tuple[list[micro.StepStats], float]:
        reducer = micro.SparseReducer(micro.TopK(), 0.1)

        def reduction(part: Comm) -> Reduction[Outcome]:
            state = reducer.start(Layout.flat(NUMEL), torch.float32, DEVICE)
            return reducer.reduction(state, drawn(comm.rank), part)

        with torch.no_grad(), fake_device():
            began = comm.now(DEVICE)
            outcomes = all_together([reduction] * 3, iter([comm] * 3), shares=True)
            return [outcome.stats for outcome in outcomes], comm.now(DEVICE) - began

    with fake_device():
        stats, whole = SimulatedRanks(2, shares=False).run(steps)[0]
    parts = [each.select_s + each.exchange_s + each.rest_s for each in stats]
    assert all(part > 0 for part in parts)
    assert all(each.exchange_s > 0 for each in stats)
    assert sum(parts) <= whole
