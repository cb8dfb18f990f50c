"""The laws of every method: those of micro.testing, and further ones for every row of the table."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm.lockstep import SimulatedRanks
from micro.comm.requests import AllGather, AllGatherLists, AllToAll, Reduction, Sending
from micro.density.base import target_count
from micro.selectors.estimated import Estimated, Fit
from micro.testing import LAWS, LAYOUT, Case, StepRecord, assert_in_band, assert_step, take
from micro.values.sparse import Overlap
from tests.products import grid
from tests.sparsifiers import TABLE, Row

DENSITY = 0.05
FFT_BINS = 136  # 257 elements are padded to 270 = 2 * 3^3 * 5
CASES = [(1, torch.float64), (3, torch.float64), (4, torch.float32)]
SEEDED = [row for row in TABLE if row.seeded]


def case_of(row: Row, world_size: int, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> Case:
    world_size = row.world_size(world_size)
    return Case(reducer=row.make(DENSITY, seed), promises=row.promises, world_size=world_size, dtype=dtype)


@cache
def taken(row: Row, world_size: int, dtype: torch.dtype) -> list[StepRecord]:
    """Return the steps of one run, which several laws look at; ranks are added where nodes are not full."""
    return case_of(row, world_size, dtype).run()


@grid(row=TABLE, law=LAWS, ranks=CASES)
def test_every_law_holds(row: Row, law: Callable[[Case], None], ranks: tuple[int, torch.dtype]) -> None:
    law(case_of(row, *ranks))


@pytest.mark.slow
@grid(row=TABLE)
def test_statistics_say_what_the_update_is(row: Row) -> None:
    reducer = row.make(DENSITY, 0)
    one_threshold = getattr(getattr(reducer, "selector", None), "overlap", Overlap.ANY) is Overlap.DISJOINT
    for case in CASES:
        for index, step in enumerate(taken(row, *case)):
            updated, world_size = int(torch.count_nonzero(step.updates[0])), row.world_size(case[0])
            assert not one_threshold or len({s.threshold for s in step.stats}) == 1
            for rank, stats in enumerate(step.stats):
                said = (stats.step, stats.numel, stats.rule, stats.skipped, len(stats.counts))
                assert said == (index, LAYOUT.numel, reducer.rule_name, False, world_size)
                assert stats.local_count == stats.counts[rank]
                assert stats.bytes_sent == stats.counts_bytes + stats.indices_bytes + stats.values_bytes
                assert row.updated != "all" or updated == stats.global_count
                assert row.updated == "other" or updated <= stats.global_count
                assert min(stats.select_s, stats.exchange_s, stats.rest_s) >= 0


@grid(row=[row for row in TABLE if row.num_collectives is not None])
def test_parts_that_state_no_traffic_make_as_few_requests_as_the_table_says(row: Row) -> None:
    cases = [case for case in CASES if case[0] > 1]
    assert min(step.stats[0].num_collectives for case in cases for step in taken(row, *case)) == row.num_collectives


@pytest.mark.slow
@grid(row=TABLE)
def test_target_follows_the_warm_up(row: Row) -> None:
    schedule, world_size = micro.WarmUp(density=0.05, start_density=0.5, steps=4), row.world_size(3)
    reducer = row.make(schedule, 0)
    sizes = (FFT_BINS,) if reducer.name == "fft" else (LAYOUT.numel,)
    if isinstance(getattr(reducer, "selector", None), micro.PerTensor):
        sizes = LAYOUT.numels
    for index, step in enumerate(Case(reducer=reducer, promises=row.promises, world_size=world_size).run(7)):
        stats = step.stats[0]
        if row.follows_density:
            assert stats.target_density == schedule.at(index)
            assert stats.target_count == sum(target_count(schedule.at(index), size) for size in sizes)
        if row.promises.band is not None and row.promises.band.at_once:
            assert_in_band(row.promises.band, stats, world_size)


@pytest.mark.slow
@grid(row=[row for row in TABLE if "two_level" not in row.name], new=[1, 2, 7])
def test_another_number_of_ranks_continues_with_the_mean_residual(row: Row, new: int) -> None:
    case = case_of(row, 4)
    resized, old = replace(case, world_size=new), case.simulation()
    for number in range(3):
        kept = take(old, case.gradients(number)).after
    simulation = resized.simulation()
    simulation.load_buckets(
        [rank["buckets"] for rank in micro.average([{"buckets": [own]} for own in old.state_dict()["ranks"]], new)]
    )
    torch.testing.assert_close(torch.stack(simulation.residuals()).mean(0), kept.mean(0))
    step = take(simulation, resized.gradients(3))
    assert_step(row.promises, step)
    assert step.stats[0].step == 3


@pytest.mark.slow
@grid(row=TABLE)
def test_only_random_methods_depend_on_the_seed_and_draw_anew_at_each_step(row: Row) -> None:
    updated = [step.updates != 0 for step in taken(row, 3, torch.float64)]
    other = case_of(row, 3, seed=1).run(1)[0].updates != 0
    assert torch.equal(other, updated[0]) == (not row.seeded)
    assert not row.seeded or not any(torch.equal(earlier, later) for earlier, later in pairwise(updated))


NCCL = {torch.uint8, torch.int8, torch.int32, torch.int64}
NCCL |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def seen(reduction: Reduction[Any], requests: list[Sending]) -> Reduction[Any]:
    """Carry on a reduction, and note what it requests of other ranks."""
    answer: Any = None
    try:
        while True:
            request = reduction.send(answer)
            asked = request if isinstance(request, list) else [request]
            requests += [each for each in asked if isinstance(each, Sending)]
            answer = yield request
    except StopIteration as end:
        return end.value


@pytest.mark.slow
@grid(row=TABLE, dtype=[torch.float32, torch.bfloat16])
def test_requests_are_what_nccl_can_carry(row: Row, dtype: torch.dtype) -> None:
    """What it is given lies in one piece, in a dtype that it has, on the device; a row has an element at least."""
    case = case_of(row, 4, dtype)
    ranks, made = SimulatedRanks(case.world_size, shares=False), list[list[Sending]]()
    for comm in ranks.comms:
        case.reducer.prepare(comm, torch.device("cpu"))
    states = [case.reducer.start(LAYOUT, dtype, torch.device("cpu")) for _ in ranks.comms]
    for step in range(3):
        grads = case.gradients(step) * (step != 1)
        made += (of_ranks := [[] for _ in ranks.comms])
        steps = [case.reducer.step(states[comm.rank], grads[comm.rank], comm) for comm in ranks.comms]
        ranks.carry_out([seen(one, requests) for one, requests in zip(steps, of_ranks, strict=True)])
    for request in (each for requests in made for each in requests):
        assert request.mine.dtype in NCCL
        assert request.mine.is_contiguous() or isinstance(request, AllGather), "messages makes rows contiguous"
        assert request.mine.device.type == "cpu"
        assert request.mine.numel() or isinstance(request, AllGatherLists | AllToAll)


@pytest.mark.slow
@grid(row=[row for row in SEEDED if not row.promises.conserves_mass])
def test_without_feedback_the_mean_over_seeds_is_the_dense_mean(row: Row) -> None:
    draws, grads = 500, drawn(2, 40, torch.float64)
    updates = torch.stack([update_of(row.make(0.25, seed), grads) for seed in range(draws)])
    standard_error = updates.std(0) / draws**0.5
    assert ((updates.mean(0) - grads.mean(0)).abs() <= 4 * standard_error).all()
    assert (standard_error > 0).all()


def drawn(world_size: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(world_size, numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def update_of(reducer: micro.Reducer, grads: Tensor) -> Tensor:
    """Return the update of a first step of ``grads`` (world_size, numel)."""
    layout = micro.Layout.flat(grads.shape[1])
    return micro.Simulation(reducer, layout, grads.shape[0], dtype=grads.dtype).step(grads).update


@grid(world_size=[1, 2, 3, 8], dtype=[torch.bfloat16, torch.float16])
def test_half_precision_means_are_rounded_once(world_size: int, dtype: torch.dtype) -> None:
    """However many ranks chose an index: sums are of single precision."""
    grads = drawn(world_size, 200, dtype)
    update = update_of(micro.SparseReducer(micro.TopK(), density=1.0, exchange=micro.Gather()), grads)
    torch.testing.assert_close(update.double(), grads.double().mean(0), rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


def test_a_dense_mean_of_half_precision_does_not_overflow_where_the_gradients_do_not() -> None:
    grads = torch.full((4, 3), 40_000.0, dtype=torch.float16)
    assert torch.equal(update_of(micro.DenseReducer(), grads), grads[0])


def test_every_selector_and_every_fit_has_a_row() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)
    reducers = [row.make(DENSITY, 0) for row in TABLE]
    selectors = [reducer.selector for reducer in reducers if isinstance(reducer, micro.SparseReducer)]
    assert {selector.name for selector in selectors} == set(micro.known(micro.Selector))
    assert {selector.fit.name for selector in selectors if isinstance(selector, Estimated)} == set(micro.known(Fit))
