"""A step counts for all buckets or for none; what is not finite is found, and named the same way on all ranks."""

import math
from dataclasses import replace
from typing import Any

import torch

import micro
from micro.comm.lockstep import SimulatedRanks
from micro.comm.loop import carried_out
from micro.comm.ranks import Comm
from micro.reducers.outcome import checked
from micro.values.nonfinite import Finding, report
from tests.fake_device import DeviceTensor, fake_device
from tests.parts import normal
from tests.products import grid

LAYOUTS = (
    micro.Layout(("a.weight", "a.bias"), ((8, 16), (8,))),
    micro.Layout(("b.weight",), ((11, 11),)),
    micro.Layout(("c.weight", "c.bias"), ((9, 7), (9,))),
)
CPU, WORLD_SIZE = torch.device("cpu"), 3
METHODS = [
    micro.SparseReducer(micro.Micro(), 0.05),
    micro.SparseReducer(micro.TopK(), 0.05, micro.Gather(), feedback=micro.MomentumCorrection()),
    micro.SparseReducer(micro.Leader(), 0.05, feedback=micro.ErrorFeedback(decay=0.9)),
    micro.DenseReducer(),
    micro.PowerSGD(rank=1),
    micro.Split(reducer=micro.SparseReducer(micro.TopK(), 0.05), min_dims=2),
]


@grid(method=METHODS, policy=["skip", "stop"], bad=range(3))
def test_one_bad_bucket_takes_all_of_them_back(method: micro.Reducer, policy: str, bad: int) -> None:
    reducer = replace(method, nonfinite=policy)  # type: ignore[type-var]
    states = [[reducer.start(layout, torch.float64, CPU) for layout in LAYOUTS] for _ in range(WORLD_SIZE)]

    def work(comm: Comm) -> Any:
        try:
            return reducer.reduce_buckets_(states[comm.rank], grads[comm.rank], comm)
        except micro.NonFiniteGradient as error:
            return str(error)

    group = SimulatedRanks(WORLD_SIZE)
    for step in range(4):
        grads = [[normal(layout.numel, seed=10 * step + rank) for layout in LAYOUTS] for rank in range(WORLD_SIZE)]
        if step == 2:
            grads[1][bad][30] = math.nan
        answers = group.run(work)
        if step == 2:
            assert not any(grad.any() for own in grads for grad in own)
            if policy == "skip":
                assert all(stats.skipped and not stats.global_count for own in answers for stats in own)
            else:
                (words,) = set(answers)
                assert f"'{'abc'[bad]}.weight'" in words
                assert "not finite at step 2" in words
    assert all(not stats.skipped and stats.step == 3 for own in answers for stats in own)
    assert all(torch.equal(one, other) for own in grads for one, other in zip(own, grads[0], strict=True))


def test_the_report_names_every_bad_rank_the_same_way_on_all() -> None:
    layout, other, bad = micro.Layout(("a", "b"), ((4,), (6,))), micro.Layout.flat(4, "c"), [None, 3, 4, None]
    found = [[Finding(layout, bad[rank]), Finding(other, 1 if rank > 1 else None)] for rank in range(4)]
    (words,) = {str(error) for error in SimulatedRanks(4).carry_out([report(each, 12, CPU) for each in found])}
    assert words.startswith("gradient of 'a' on rank 1, 'b' on rank 2, 'c' on rank 3 is not finite at step 12")


def test_a_mean_whose_sum_overflows_is_finite() -> None:
    for update, is_finite in ((3e38, True), (math.inf, False)):
        made = carried_out(checked(torch.tensor([3e38, 1.0, update, 1.0]), is_finite=True, num_updated=3), Comm())
        assert (made.bad_update is None) == is_finite


def test_an_accelerator_is_read_once() -> None:
    with fake_device() as waits:
        one = DeviceTensor(torch.tensor(1.0))
        reduction = checked(DeviceTensor(torch.ones(4)), one, is_finite=one > 0, num_updated=3 * one)
        made = carried_out(reduction, Comm())
        assert waits.seen.total() == 1
    assert (made.is_finite, made.num_updated, made.records) == (True, 3, [1.0])
