"""A step of lists on a device: a bad one has no effect there, and the host learns of it later, or not at all."""

from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch

import micro
from micro.reducers.attempt import decide
from micro.reducers.late_attempt import LateFindings
from micro.reducers.unread_attempt import judged_
from micro.sparse import Exchanged, SparseValues
from micro.thread_ranks import SimulatedGroup
from tests.device_steps import no_kernels
from tests.fake_device import DEVICE, DeviceTensor, fake_device
from tests.host_waits import totals
from tests.recorded_streams import recorded_streams

LAYOUT = micro.Layout.flat(400)
STEPS, BAD_STEP, PLACE = 4, 1, 7
METHODS: dict[str, dict[str, Any]] = {
    "gathered": {"selector": micro.TopK(), "exchange": micro.Gather()},
    "union": {"selector": micro.Micro()},
    "momentum": {"selector": micro.TopK(), "exchange": micro.Gather(), "feedback": micro.MomentumCorrection()},
    "decay": {"selector": micro.TopK(), "exchange": micro.Gather(), "feedback": micro.ErrorFeedback(decay=0.5)},
    "estimate": {"selector": micro.TopK(), "exchange": micro.Gather(), "feedback": micro.EF21()},
    "no feedback": {"selector": micro.RandomK(), "feedback": micro.NoFeedback()},
    "coded": {"selector": micro.Micro(), "codec": micro.Half()},
    "merged": {"selector": micro.TopK(), "exchange": micro.GTopK()},
    "regions": {"selector": micro.TopK(), "exchange": micro.DSA()},
}


def gradient(rank: int, step: int, bucket: int = 0) -> torch.Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(100 * step + 10 * bucket + rank))


def steps(
    reducer: micro.Reducer,
    *,
    bad: float = torch.nan,
    on_device: bool = True,
    dtype: torch.dtype = torch.float32,
) -> list[list[Any]]:
    """Return what each of two ranks has after each step: update, memory, record; or the error, after which it ends.

    On rank 1 one step's gradient holds ``bad``.
    """

    def work(comm: micro.Comm) -> list[Any]:
        seen: list[Any] = []
        with torch.no_grad(), fake_device() if on_device else nullcontext():
            state = reducer.start(LAYOUT, dtype, DEVICE if on_device else torch.device("cpu"))
            for index in range(STEPS):
                grad = gradient(comm.rank, index).to(dtype)
                if index == BAD_STEP and comm.rank == 1:
                    grad[PLACE] = bad
                comm.begin_step()
                try:
                    stats = reducer.reduce_(state, DeviceTensor(grad) if on_device else grad, comm)
                except micro.NonFiniteGradient as error:
                    return [*seen, str(error)]
                memory = {key: vector.tolist() for key, vector in state.memory.items()}
                record = stats.skipped, stats.global_count, stats.counts, stats.threshold, stats.forgotten
                seen.append((grad.tolist(), memory, record))
        return seen

    with no_kernels(), recorded_streams(), closing(SimulatedGroup(2)) as group:
        return group.run(work)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_bad_step_leaves_what_it_leaves_on_a_cpu(method: str, dtype: torch.dtype) -> None:
    reducer = micro.SparseReducer(**METHODS[method], density=0.05, nonfinite="skip")
    on_device, on_cpu = (steps(reducer, on_device=place, dtype=dtype) for place in (True, False))
    for device_rank, cpu_rank in zip(on_device, on_cpu, strict=True):
        for (update, kept, record), (cpu_update, cpu_kept, cpu_record) in zip(device_rank, cpu_rank, strict=True):
            assert update == cpu_update
            assert kept == cpu_kept
            assert record == cpu_record
        assert [record[0] for _, _, record in device_rank] == [index == BAD_STEP for index in range(STEPS)]
        assert not any(device_rank[BAD_STEP][0])


@pytest.mark.parametrize("is_finite", [True, False])
def test_an_update_that_overflows_has_no_effect_and_is_cut(is_finite: bool) -> None:
    """Whether a gradient was not finite comes first: where a step is bad by that, sums say nothing."""
    largest = torch.finfo(torch.float64).max
    acc = torch.tensor([1.0, 0.9 * largest, 2.0, -0.9 * largest], dtype=torch.float64)
    entries = SparseValues(torch.tensor([0, 3], dtype=torch.int32), acc[[0, 3]])
    exchanged = Exchanged(update=(entries,), sent=entries, counts=(2,), num_updated=2, is_finite=is_finite)
    with closing(SimulatedGroup(1)) as group:
        judged = group.run(lambda comm: judged_(acc, exchanged, 2.0, comm, None))[0]
    assert not judged.is_good
    assert not judged.exchanged.sent.values.any()
    assert not judged.exchanged.update[0].values.any()
    assert acc.tolist() == [1.0, 0.9 * largest, 2.0, -largest / 2 if is_finite else -0.9 * largest]
    found = LateFindings(micro.Layout.flat(acc.numel()), 3, judged.late(None)).findings()
    assert [(one.in_gradient, one.in_update) for one in found] == [(None, 3 if is_finite else None)]


@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_stop_one_step_later(method: str) -> None:
    first, second = steps(micro.SparseReducer(**METHODS[method], density=0.05))
    assert first[-1] == second[-1]
    assert "on rank 1" in first[-1]
    assert f"at step {BAD_STEP}" in first[-1]
    assert len(first) == len(second) == BAD_STEP + 2
    assert not any(first[BAD_STEP][0])


@pytest.mark.parametrize("bad_bucket", [0, 1, None])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_step_of_two_buckets_counts_for_both_or_for_none(policy: Any, bad_bucket: int | None) -> None:
    """Of several buckets the host learns before the step counts: all that are good must be taken back too."""
    reducer = micro.SparseReducer(micro.TopK(), 0.05, exchange=micro.Gather(), nonfinite=policy)

    def work(comm: micro.Comm) -> list[tuple[bool, bool]]:
        with torch.no_grad(), fake_device() as waits:
            states = [reducer.start(LAYOUT, torch.float32, DEVICE) for _ in range(2)]
            grads = [gradient(comm.rank, 0, bucket) for bucket in range(2)]
            sums = [grad.clone() for grad in grads]
            if bad_bucket is not None and comm.rank == 1:
                grads[bad_bucket][PLACE], sums[bad_bucket][PLACE] = torch.nan, 0.0
            attempts = [reducer.attempt_(*each, comm) for each in zip(states, map(DeviceTensor, grads), strict=True)]
            decision = decide(attempts, policy, comm)
            assert totals(waits.seen)[0] == 0 or decision.error
            assert (decision.error is None) == (bad_bucket is None or policy == "skip")
            assert all(stats.skipped == (bad_bucket is not None) for stats in decision.stats)
            is_kept = [
                torch.equal(*map(torch.Tensor.cpu, each))
                for each in zip([state.residual for state in states], sums, strict=True)
            ]
            return [(bool(grad.any()), kept) for grad, kept in zip(grads, is_kept, strict=True)]

    with recorded_streams(), closing(SimulatedGroup(2)) as group:
        for seen in group.run(work):
            assert seen == [(bad_bucket is None, bad_bucket is not None)] * 2
