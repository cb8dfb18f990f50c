"""MiCRO in messages of fixed size: what a rank's room does, and what a device knows before its host."""

from contextlib import closing

import pytest
import torch
from torch import Tensor

import micro
from micro.reducers.attempt import decide
from micro.thread_ranks import SimulatedGroup
from tests.fake_device import DEVICE, DeviceTensor, fake_device
from tests.recorded_streams import recorded_streams

LAYOUT = micro.Layout.flat(4000)
K, RANKS = 200, 4
FIXED = micro.FixedMicro(density=0.05)


def normal(step: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(RANKS, LAYOUT.numel, generator=torch.Generator().manual_seed(step))


def steps(reducer: micro.Reducer, gradients: list[Tensor]) -> list[micro.StepStats]:
    with closing(micro.Simulation(reducer, LAYOUT, RANKS)) as simulation:
        return [simulation.step_(grads)[0] for grads in gradients]


def test_no_rank_gives_more_than_its_message_holds_and_the_others_give_the_rest() -> None:
    room = FIXED.room(K, LAYOUT.numel, RANKS)
    heavy = [normal(step) for step in range(8)]
    for grads in heavy:
        grads[:, :1000] *= 100.0  # nearly all of the largest lie in one slice
    for stats in steps(FIXED, heavy):
        assert max(stats.counts) <= room == 115
        assert stats.global_count == K or stats.step < 4
    assert stats.global_count == K
    assert stats.overfull
    assert not steps(FIXED, [normal(0)])[0].overfull


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_k_come_back_after_a_jump_of_scale(scale: float) -> None:
    before, after = [normal(step) for step in range(3)], [normal(step, scale) for step in range(3, 14)]
    found = steps(micro.FixedMicro(density=0.05, slack=0.5), [*before, *after])
    assert [stats.global_count for stats in found[:3]] == [K] * 3
    assert [stats.global_count for stats in found[-3:]] == [K] * 3
    assert all(stats.num_collectives == 2 for stats in found[1:])


def test_the_threshold_and_the_largest_are_those_of_the_slices() -> None:
    with closing(micro.Simulation(FIXED, LAYOUT, RANKS)) as simulation:
        grads = normal(0)
        stats = simulation.step_(updates := grads.clone())[0]
    slices = [grads[rank, 1000 * rank : 1000 * (rank + 1)].abs() for rank in range(RANKS)]
    chosen = [updates[0, 1000 * rank : 1000 * (rank + 1)] != 0 for rank in range(RANKS)]
    for magnitudes, is_chosen, count in zip(slices, chosen, stats.counts, strict=True):
        assert torch.equal(magnitudes.topk(count).values.sort().values, magnitudes[is_chosen].sort().values)
    exact = torch.cat(slices).topk(K).values[-1]
    assert stats.threshold == pytest.approx(float(exact), rel=0.02)


def test_candidates_fit_their_buffer_while_residuals_grow() -> None:
    """Counted as far as messages hold them, they could never be too many, and those of the lowest indices were sent."""
    layout = micro.Layout.flat(40_000)
    reducer = micro.FixedMicro(density=0.01)
    with closing(micro.Simulation(reducer, layout, 2)) as simulation:
        for step in range(12):
            grads = torch.randn(2, layout.numel, generator=torch.Generator().manual_seed(step))
            kept = torch.stack(simulation.residuals())
            update = simulation.step(grads).update
    start = 20_000 * (step % 2)
    sums = (kept[0] + grads[0])[start : start + 20_000].abs()
    chosen = update[start : start + 20_000] != 0
    assert float(sums[chosen].min()) > 0.98 * float(sums.topk(int(chosen.sum())).values[-1])


@pytest.mark.parametrize("slack", [-0.1, float("inf"), float("nan")])
def test_a_slack_has_its_range(slack: float) -> None:
    with pytest.raises(ValueError, match="slack of micro_fixed must be at least 0, got"):
        micro.FixedMicro(density=0.1, slack=slack)


# --- on a device, whose host does not wait ----------------------------------------------------------------------------


def reduced_on_device(policy: str, bad_bucket: int | None) -> list[list[object]]:
    """Return what each of two ranks saw of two buckets in four steps, of which the second has a NaN on rank 1.

    For each step: whether an update was not zero, by bucket; then whether it counts as skipped, or the error.
    """
    reducer = micro.FixedMicro(density=0.05, nonfinite=policy)  # type: ignore[arg-type]

    def work(comm: micro.Comm) -> list[object]:
        comm.timed = False
        seen: list[object] = []
        with torch.no_grad(), fake_device() as waits:
            states = [reducer.start(LAYOUT, torch.float32, DEVICE) for _ in range(2)]
            for index in range(4):
                grads = [normal(10 * index + bucket)[comm.rank] for bucket in range(2)]
                if index == 1 and comm.rank == 1 and bad_bucket is not None:
                    grads[bad_bucket][7] = torch.nan
                waits.seen.clear()
                try:
                    own = [DeviceTensor(grad) for grad in grads]
                    attempts = [reducer.attempt_(*each, comm) for each in zip(states, own, strict=True)]
                    stats = decide(attempts, reducer.policy, comm).stats
                except micro.NonFiniteGradient as error:
                    seen.append(str(error))
                    break
                assert index == 0 or not waits.seen
                seen.append([*(bool(grad.any()) for grad in grads), *(each.skipped for each in stats)])
        return seen

    with recorded_streams(), closing(SimulatedGroup(2)) as group:
        return group.run(work)


@pytest.mark.parametrize("bad_bucket", [0, 1])
def test_a_bad_bucket_takes_all_back_on_the_device(bad_bucket: int) -> None:
    for seen in reduced_on_device("skip", bad_bucket):
        good, bad = [True, True, False, False], [False, False, True, True]
        assert seen == [good, bad, good, good]


def test_the_host_stops_all_ranks_one_step_later() -> None:
    first, second = reduced_on_device("stop", 0)
    assert first[:2] == second[:2] == [[True, True, False, False], [False, False, True, True]]
    assert first[2] == second[2]
    assert "on rank 1" in str(first[2])
    assert "at step 1" in str(first[2])
    assert len(first) == 3


def test_nothing_stops_where_all_is_finite() -> None:
    for seen in reduced_on_device("stop", None):
        assert seen == [[True, True, False, False]] * 4
