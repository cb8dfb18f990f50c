"""The laws that every method obeys: those of micro.testing, and those of the table alone, for every row of it."""

from collections.abc import Callable
from contextlib import closing
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import micro
from micro.density.base import target_count
from micro.selectors.estimated import Estimated, Fit
from micro.simulate import Simulation
from micro.testing import LAWS, LAYOUT, Case, Taken, assert_in_band, gradients, run, simulate, take
from tests.products import grid
from tests.sparsifiers import TABLE, Outcome, Row

DENSITY = 0.05
FFT_BINS = 136  # 257 elements are padded to 270 = 2 * 3^3 * 5
CASES = [(1, torch.float64), (3, torch.float64), (4, torch.float32)]
SEEDED = [row for row in TABLE if row.seeded]


def case_of(row: Row, world_size: int, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> Case:
    world_size = row.world_size(world_size)
    return Case(reducer=row.make(DENSITY, seed), promises=row.promises, world_size=world_size, dtype=dtype)


@cache
def taken(row: Row, world_size: int, dtype: torch.dtype) -> list[Taken]:
    """Return the steps of one run, which several laws look at; ranks are added where nodes are not full."""
    return run(case_of(row, world_size, dtype))


@grid(row=TABLE, law=LAWS)
def test_every_law_holds(row: Row, law: Callable[[Case], None]) -> None:
    for world_size, dtype in CASES:
        law(case_of(row, world_size, dtype))


@grid(row=TABLE, case=CASES)
def test_statistics_say_what_the_update_is(row: Row, case: tuple[int, torch.dtype]) -> None:
    world_size = row.world_size(case[0])
    for index, step in enumerate(taken(row, *case)):
        updated = int(torch.count_nonzero(step.updates[0]))
        for rank, stats in enumerate(step.stats):
            assert (stats.step, stats.numel, stats.rule, stats.skipped) == (index, LAYOUT.numel, row.rule, False)
            assert len(stats.counts) == world_size
            assert stats.local_count == stats.counts[rank]
            if not row.spectral:
                assert updated == stats.global_count if row.updates_all else updated <= stats.global_count
            assert min(stats.select_s, stats.exchange_s, stats.rest_s) >= 0
        assert row.own_thresholds or len({s.threshold for s in step.stats}) == 1


@grid(row=TABLE, case=CASES)
def test_counted_bytes_are_the_closed_form(row: Row, case: tuple[int, torch.dtype]) -> None:
    last_counts: tuple[int, ...] = ()
    for step in taken(row, *case):
        last_counts, before = step.stats[0].counts, last_counts
        for rank, stats in enumerate(step.stats):
            promised = row.bytes_sent(outcome_of(row, step, rank, before), rank)
            counted = {"counts": stats.counts_bytes, "indices": stats.indices_bytes, "values": stats.values_bytes}
            if row.upper_bounds:
                assert all(0 <= counted[kind] <= promised[kind] for kind in promised)
            else:
                assert promised == pytest.approx(counted)
            assert stats.bytes_sent == stats.counts_bytes + stats.indices_bytes + stats.values_bytes


def outcome_of(row: Row, step: Taken, rank: int, last_counts: tuple[int, ...]) -> Outcome:
    stats = step.stats[rank]
    return Outcome(
        world_size=len(stats.counts),
        counts=stats.counts,
        num_updated=stats.global_count,
        value_bytes=step.grads.dtype.itemsize,
        num_extra=max(stats.num_collectives - row.num_collectives, 0),
        numel=LAYOUT.numel,
        step=stats.step,
        acc=step.waiting + step.grads if step.waiting.numel() else step.grads,
        update=step.updates[rank],
        last_counts=last_counts,
        overfull=stats.overfull,
    )


@grid(row=TABLE)
def test_a_step_takes_at_least_as_many_collectives_as_the_table_says_and_one_takes_no_more(row: Row) -> None:
    cases = [case for case in CASES if case[0] > 1]
    assert min(step.stats[0].num_collectives for case in cases for step in taken(row, *case)) == row.num_collectives


@grid(row=TABLE)
def test_target_follows_the_warm_up(row: Row) -> None:
    schedule, world_size = micro.WarmUp(density=0.05, start_density=0.5, steps=4), row.world_size(3)
    case = Case(reducer=row.make(schedule, 0), promises=row.promises, world_size=world_size)
    sizes = LAYOUT.numels if row.by_tensor else (FFT_BINS,) if row.name.startswith("fft") else (LAYOUT.numel,)
    for index, step in enumerate(run(case, 7)):
        stats = step.stats[0]
        if row.follows_density:
            assert stats.target_density == schedule.at(index)
            assert stats.target_count == sum(target_count(schedule.at(index), size) for size in sizes)
        if row.band is not None and row.band.at_once:
            assert_in_band(row.band, stats, world_size)


@grid(row=TABLE)
def test_only_random_methods_depend_on_the_seed(row: Row) -> None:
    with closing(simulate(case_of(row, 3, seed=1))) as simulation:
        step = take(simulation, gradients(LAYOUT, simulation.world_size, 0, torch.float64))
    first = taken(row, 3, torch.float64)[0]
    assert torch.equal(step.updates != 0, first.updates != 0) == (not row.seeded)


@grid(row=SEEDED)
def test_random_indices_change_from_step_to_step(row: Row) -> None:
    for earlier, later in pairwise(taken(row, 3, torch.float64)):
        assert not torch.equal(earlier.updates[0] != 0, later.updates[0] != 0)


@pytest.mark.slow
@grid(row=[row for row in SEEDED if not row.conserves_mass])
def test_without_feedback_the_mean_over_seeds_is_the_dense_mean(row: Row) -> None:
    world_size, draws, layout = 2, 500, micro.Layout.flat(40)
    grads = gradients(layout, world_size, 0, torch.float64)
    drawn = torch.stack([update_of(row.make(0.25, seed), grads) for seed in range(draws)])
    standard_error = drawn.std(0) / draws**0.5
    assert ((drawn.mean(0) - grads.mean(0)).abs() <= 4 * standard_error).all()
    assert (standard_error > 0).all()


def update_of(reducer: micro.Reducer, grads: Tensor) -> Tensor:
    """Return the update of a first step of ``grads`` (world_size, numel)."""
    layout = micro.Layout.flat(grads.shape[1])
    with closing(Simulation(reducer, layout, grads.shape[0], dtype=grads.dtype)) as simulation:
        return simulation.step(grads).update


@grid(world_size=[1, 2, 3, 8], dtype=[torch.bfloat16, torch.float16])
def test_half_precision_means_are_rounded_once(world_size: int, dtype: torch.dtype) -> None:
    """However many ranks chose an index: sums are of single precision."""
    grads = gradients(micro.Layout.flat(200), world_size, 0, dtype)
    update = update_of(micro.SparseReducer(micro.TopK(), density=1.0, exchange=micro.Gather()), grads)
    torch.testing.assert_close(update.double(), grads.double().mean(0), rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


def test_a_dense_mean_of_half_precision_does_not_overflow_where_the_gradients_do_not() -> None:
    grads = torch.full((4, 3), 40_000.0, dtype=torch.float16)
    assert torch.equal(update_of(micro.DenseReducer(), grads), grads[0])


def test_names_of_the_table_are_unique() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


def test_every_selector_and_every_fit_has_a_row() -> None:
    reducers = [row.make(DENSITY, 0) for row in TABLE]
    selectors = [reducer.selector for reducer in reducers if isinstance(reducer, micro.SparseReducer)]
    assert {selector.name for selector in selectors} == set(micro.known(micro.Selector))
    assert {selector.own_fit.name for selector in selectors if isinstance(selector, Estimated)} == set(micro.known(Fit))
