"""The laws that every method obeys: each test here runs for every row of the table."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.density.base import target_count
from micro.lockstep import SimulatedRanks
from micro.spans import Spans
from tests.products import grid
from tests.saving import through_a_file
from tests.sparsifiers import TABLE, Outcome, Row

DTYPES = (torch.float32, torch.float64)
LAYOUT = micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (8,), (11, 11)))
SCALES = {"a.weight": 1.0, "a.bias": 5.0, "b.weight": 0.2}  # layers differ in scale
FFT_BINS = 136  # 257 elements are padded to 270 = 2 * 3^3 * 5
DENSITY = 0.05
STEPS = 5


def is_prompt(row: Row) -> bool:
    """Tell whether the density is inside its band whatever the gradient."""
    return row.band is not None and row.band.at_once


CASES = [(1, torch.float64), (3, torch.float64), (4, torch.float32)]
CONSERVING = [row for row in TABLE if row.conserves_mass]
BANDED = [row for row in TABLE if row.band]
PROMPT = [row for row in TABLE if is_prompt(row)]
SEEDED = [row for row in TABLE if row.seeded]


def gradients(layout: micro.Layout, world_size: int, step: int, dtype: torch.dtype) -> Tensor:
    """Return (world_size, numel) normal gradients: a part that all ranks share, and noise of their own."""
    randomness = torch.Generator().manual_seed(1000 * step + world_size)
    shared = torch.randn(1, layout.numel, generator=randomness, dtype=torch.float64)
    own = torch.randn(world_size, layout.numel, generator=randomness, dtype=torch.float64)
    drawn = shared + own
    for name, place in layout.slices():
        drawn[:, place] *= SCALES.get(name, 1.0)
    return drawn.to(dtype)


@dataclass(frozen=True)
class Taken:
    """One step: what went in, what came out, and the residuals around it."""

    grads: Tensor
    before: Tensor  # what is left of the residual, and what the feedback's momentum adds to it
    updates: Tensor
    after: Tensor
    stats: list[micro.StepStats]
    momentum: Tensor | None = None  # the part of before that is not the residual, where there is one
    kept_dtype: torch.dtype | None = None  # of the residuals, where after has another


def mean_in_node(row: Row, grads: Tensor) -> Tensor:
    """Return (num_nodes, numel) means of ``grads`` (world_size, numel) over the ranks of each node."""
    return sum_in_node(row, grads) / row.ranks_per_node


def sum_in_node(row: Row, kept: Tensor) -> Tensor:
    """Return (num_nodes, numel) sums of ``kept`` (world_size, numel) over the ranks of each node."""
    return kept.unflatten(0, (-1, row.ranks_per_node)).sum(1)


def of_nodes(row: Row, step: Taken) -> Taken:
    """Return a step as nodes see it: each has the mean gradient of its ranks, and what all of them keep."""
    if row.ranks_per_node == 1:
        return step
    before, after = (sum_in_node(row, kept.double()) for kept in (step.before, step.after))
    grads = mean_in_node(row, step.grads.double())
    kept = step.after.dtype if step.after.numel() else step.updates.dtype
    return replace(
        step, grads=grads, before=before, updates=step.updates[:: row.ranks_per_node], after=after, kept_dtype=kept
    )


def assert_mass_conserved(row: Row, step: Taken) -> None:
    """sum(acc over ranks) == sum(residual) + world_size * update, at every element, but for the rounding of sums.

    Where gradients are averaged within nodes first, nodes stand for ranks.
    """
    step = of_nodes(row, step)
    world_size = step.updates.shape[0]
    before = step.before.double() if step.before.numel() else torch.zeros_like(step.grads, dtype=torch.float64)
    acc = before + step.grads.double()
    after = step.after.double().sum(0) if step.after.numel() else 0.0
    lost = acc.sum(0) - after - world_size * step.updates[0].double()
    size = (before.abs() + step.grads.double().abs()).sum(0)
    size += step.after.double().abs().sum(0) if step.after.numel() else 0.0  # codes of few bits may send too much
    if step.momentum is not None:  # it may cancel in before
        size += step.momentum.double().abs().sum(0)
    if row.mixes:
        size = size.norm().expand_as(size)
    allowed = (world_size + 4) * resolution(row, step) * size
    assert (lost.abs() <= allowed).all(), f"lost {lost.abs().max():.3g} of {size.max():.3g}"


def resolution(row: Row, step: Taken) -> Tensor:
    """Return the rounding (numel,) of what keeps mass: the residual's, for it keeps what a half mean rounds off too."""
    kept = step.kept_dtype or (step.after.dtype if step.after.numel() else step.updates.dtype)
    rounding = torch.full((step.updates.shape[1],), torch.finfo(kept).eps, dtype=torch.float64)
    if row.dense and kept != step.updates.dtype:  # nothing is kept of these
        for name, place in LAYOUT.slices():
            if name in row.dense:
                rounding[place] = torch.finfo(step.updates.dtype).eps
    return rounding


def momentum_of(reducer: micro.Reducer) -> float:
    return getattr(getattr(reducer, "feedback", None), "momentum", 0.0)


def decay_of(reducer: micro.Reducer) -> float:
    return getattr(getattr(reducer, "feedback", None), "decay", 1.0)


def assert_waits(residual: Tensor, expected: Tensor, reducer: micro.Reducer) -> None:
    """Nothing was sent: all is kept, bit for bit unless a momentum was added in another order."""
    allowed = 1e-12 if momentum_of(reducer) else 0.0
    torch.testing.assert_close(residual, expected, rtol=allowed, atol=allowed)


def kept_of(grads: Tensor, row: Row) -> Tensor:
    """Return what nodes keep (num_nodes, numel) of ``grads`` (world_size, numel) that are not sent: what is finite."""
    means = mean_in_node(row, grads)
    kept = torch.where(torch.isfinite(means), means, 0)
    for name, place in LAYOUT.slices():
        if name in row.dense:
            kept[:, place] = 0
    return kept


def take(simulation: micro.Simulation, grads: Tensor) -> Taken:
    before, momentum = decay_of(simulation.reducer) * torch.stack(simulation.residuals()), None
    if factor := momentum_of(simulation.reducer):
        momentum = factor * torch.stack(simulation.memory("momentum"))
        before += momentum
    updates = grads.clone()
    stats = simulation.step_(updates)
    return Taken(grads, before, updates, torch.stack(simulation.residuals()), stats, momentum)


def simulate(
    row: Row,
    world_size: int,
    *,
    layout: micro.Layout = LAYOUT,
    dtype: torch.dtype = torch.float64,
    density: Any = DENSITY,
    seed: int = 0,
    nonfinite: str = "stop",
    shares: bool = False,
) -> micro.Simulation:
    reducer = replace(row.make(density, seed), nonfinite=nonfinite)  # type: ignore[type-var]
    return micro.Simulation(reducer, layout, world_size, dtype=dtype, shares=shares)


@cache
def taken(row: Row, world_size: int, dtype: torch.dtype) -> list[Taken]:
    """Return the steps of one run, which several laws look at; ranks are added where nodes are not full."""
    world_size = row.world_size(world_size)
    with closing(simulate(row, world_size, dtype=dtype)) as simulation:
        return [take(simulation, gradients(LAYOUT, world_size, step, dtype)) for step in range(STEPS)]


def assert_replicas_equal(updates: Tensor) -> None:
    for rank in range(1, updates.shape[0]):
        assert torch.equal(updates[0], updates[rank]), f"rank {rank} holds another update than rank 0"


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


# --- every step of an ordinary run ------------------------------------------------------------------------------------


@grid(row=TABLE, case=CASES)
def test_replicas_are_bitwise_equal(row: Row, case: tuple[int, torch.dtype]) -> None:
    for step in taken(row, *case):
        assert_replicas_equal(step.updates)
        assert torch.isfinite(step.updates).all()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_what_one_rank_computes_for_all_is_what_each_would(row: Row) -> None:
    case = row.world_size(4), torch.float32
    with closing(simulate(row, case[0], dtype=case[1], shares=True)) as simulation:
        for number, alone in enumerate(taken(row, 4, case[1])):
            shared = take(simulation, gradients(LAYOUT, case[0], number, case[1]))
            assert_replicas_equal(shared.updates)
            assert same_bits(shared.updates, alone.updates)
            assert same_bits(shared.after, alone.after)
            for mine, other in zip(shared.stats, alone.stats, strict=True):
                assert (mine.counts, mine.global_count) == (other.counts, other.global_count)
                assert mine.bytes_sent == other.bytes_sent


@grid(row=CONSERVING, case=CASES)
def test_mass_is_conserved(row: Row, case: tuple[int, torch.dtype]) -> None:
    for step in taken(row, *case):
        assert_mass_conserved(row, step)


@grid(row=TABLE, case=CASES)
def test_statistics_say_what_the_update_is(row: Row, case: tuple[int, torch.dtype]) -> None:
    world_size = row.world_size(case[0])
    for index, step in enumerate(taken(row, *case)):
        for rank, stats in enumerate(step.stats):
            assert stats.step == index
            assert stats.numel == LAYOUT.numel
            assert stats.rule == row.rule
            assert len(stats.counts) == world_size
            assert stats.local_count == stats.counts[rank]
            updated = int(torch.count_nonzero(step.updates[0]))
            if not row.spectral:
                assert updated == stats.global_count if row.updates_all else updated <= stats.global_count
            assert not stats.skipped
            assert min(stats.select_s, stats.exchange_s, stats.rest_s) >= 0
        assert len({(s.counts, s.global_count, s.target_count) for s in step.stats}) == 1
        assert row.own_thresholds or len({s.threshold for s in step.stats}) == 1


@grid(row=TABLE, case=CASES)
def test_counted_bytes_are_the_closed_form(row: Row, case: tuple[int, torch.dtype]) -> None:
    world_size, dtype = row.world_size(case[0]), case[1]
    last_counts: tuple[int, ...] = ()
    for step in taken(row, *case):
        last_counts, before = step.stats[0].counts, last_counts
        for rank, stats in enumerate(step.stats):
            extra = max(stats.num_collectives - row.num_collectives, 0)
            size = dtype.itemsize
            acc = step.before + step.grads if step.before.numel() else step.grads
            outcome = Outcome(
                world_size,
                stats.counts,
                stats.global_count,
                size,
                extra,
                LAYOUT.numel,
                stats.step,
                acc,
                step.updates[rank],
                before,
                stats.overfull,
            )
            promised = row.bytes_sent(outcome, rank)
            counted = {"counts": stats.counts_bytes, "indices": stats.indices_bytes, "values": stats.values_bytes}
            if row.upper_bounds:
                assert all(0 <= counted[kind] <= promised[kind] for kind in promised)
            else:
                assert promised == pytest.approx(counted)
            assert stats.bytes_sent == stats.counts_bytes + stats.indices_bytes + stats.values_bytes
            assert world_size > 1 or stats.num_collectives == 0


@grid(row=TABLE)
def test_a_step_takes_at_least_as_many_collectives_as_the_table_says_and_one_takes_no_more(row: Row) -> None:
    cases = [case for case in CASES if case[0] > 1]
    assert min(step.stats[0].num_collectives for case in cases for step in taken(row, *case)) == row.num_collectives


@grid(row=BANDED, world_size=[1, 5])
def test_density_is_inside_its_band(row: Row, world_size: int) -> None:
    world_size = row.world_size(world_size)
    layout = micro.Layout.flat(4000)
    with closing(simulate(row, world_size, layout=layout, dtype=torch.float32)) as simulation:
        for index in range(5):
            step = take(simulation, gradients(layout, world_size, index, torch.float32))
            assert_in_band(row, step.stats[0], world_size)


def assert_in_band(row: Row, stats: micro.StepStats, world_size: int) -> None:
    assert row.band
    k = stats.target_count
    assert row.band.lowest * k <= stats.global_count <= row.band.highest(world_size) * k


@grid(row=TABLE)
def test_target_follows_the_warm_up(row: Row) -> None:
    schedule, world_size = micro.WarmUp(density=0.05, start_density=0.5, steps=4), row.world_size(3)
    with closing(simulate(row, world_size, density=schedule)) as simulation:
        for index in range(7):
            step = take(simulation, gradients(LAYOUT, world_size, index, torch.float64))
            assert_replicas_equal(step.updates)
            if row.conserves_mass:
                assert_mass_conserved(row, step)
            if row.follows_density:
                assert step.stats[0].target_density == schedule.at(index)
                whole = (FFT_BINS,) if row.name.startswith("fft") else (LAYOUT.numel,)
                sizes = LAYOUT.numels if row.by_tensor else whole
                assert step.stats[0].target_count == sum(target_count(schedule.at(index), size) for size in sizes)
            if is_prompt(row):
                assert_in_band(row, step.stats[0], world_size)


# --- unusual gradients ------------------------------------------------------------------------------------------------

UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "tied": torch.ones_like,
    "tied in magnitude": torch.sign,
    "tiny": lambda x: 1e-30 * x,
    "one element": lambda x: torch.nn.functional.one_hot(torch.tensor(7), x.shape[1]).to(x.dtype).expand_as(x),
    "one rank": lambda x: x * (torch.arange(x.shape[0])[:, None] == x.shape[0] - 1),
    "large": lambda x: 1e6 * x,
}


@grid(row=TABLE, kind=UNUSUAL, world_size=[1, 3], dtype=DTYPES)
def test_unusual_gradients_do_no_harm(row: Row, world_size: int, kind: str, dtype: torch.dtype) -> None:
    world_size = row.world_size(world_size)
    change = UNUSUAL[kind]
    with closing(simulate(row, world_size, dtype=dtype)) as simulation:
        for index in range(4):
            usual = gradients(LAYOUT, world_size, index, dtype)
            grads = change(usual) if index < 3 else usual  # and back to ordinary ones
            step = take(simulation, grads)
            assert_replicas_equal(step.updates)
            assert torch.isfinite(step.updates).all()
            if row.conserves_mass:
                assert_mass_conserved(row, step)
            if row.band and row.band.at_once:
                assert step.stats[0].global_count <= row.band.highest(world_size) * step.stats[0].target_count
            if kind == "zero" and index < 3:
                assert not step.updates.any()


@grid(row=PROMPT, kind=["tied", "tied in magnitude"])
def test_ties_do_not_widen_the_band(row: Row, kind: str) -> None:
    with closing(simulate(row, 4)) as simulation:
        for index in range(3):
            step = take(simulation, UNUSUAL[kind](gradients(LAYOUT, 4, index, torch.float64)))
            assert_in_band(row, step.stats[0], 4)


@grid(row=TABLE, size=[(2, 3), (1, 4)], dtype=DTYPES)
def test_fewer_elements_than_ranks(row: Row, size: tuple[int, int], dtype: torch.dtype) -> None:
    numel, world_size = size[0], row.world_size(size[1])
    layout = micro.Layout.flat(numel)
    with closing(simulate(row, world_size, layout=layout, dtype=dtype, density=0.4)) as simulation:
        for index in range(world_size + 2):  # every rank has every slice once, some twice
            step = take(simulation, gradients(layout, world_size, index, dtype))
            assert_replicas_equal(step.updates)
            if row.conserves_mass:
                assert_mass_conserved(row, step)
            if is_prompt(row):
                assert step.stats[0].global_count >= min(step.stats[0].target_count, numel)


@pytest.mark.slow
@grid(row=TABLE, dtype=[torch.bfloat16, torch.float16])
def test_half_precision_gradients_lose_nothing_that_single_precision_holds(row: Row, dtype: torch.dtype) -> None:
    world_size = row.world_size(3)
    with closing(simulate(row, world_size, dtype=dtype)) as simulation:
        for index in range(4):
            step = take(simulation, gradients(LAYOUT, world_size, index, dtype))
            assert step.updates.dtype == dtype
            assert_replicas_equal(step.updates)
            assert not step.after.numel() or step.after.dtype == torch.float32
            if row.conserves_mass:
                assert_mass_conserved(row, step)


@grid(world_size=[1, 2, 3, 8], dtype=[torch.bfloat16, torch.float16])
def test_half_precision_means_are_rounded_once(world_size: int, dtype: torch.dtype) -> None:
    """However many ranks chose an index: sums are of single precision."""
    gather = micro.SparseReducer(micro.TopK(), density=1.0, exchange=micro.Gather())
    with closing(micro.Simulation(gather, micro.Layout.flat(200), world_size, dtype=dtype)) as simulation:
        grads = gradients(simulation.layout, world_size, 0, dtype)
        out = simulation.step(grads)
    torch.testing.assert_close(out.update.double(), grads.double().mean(0), rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


def test_a_dense_mean_of_half_precision_does_not_overflow_where_the_gradients_do_not() -> None:
    grads = torch.full((4, 3), 40_000.0, dtype=torch.float16)
    with closing(micro.Simulation(micro.DenseReducer(), micro.Layout.flat(3), 4, dtype=torch.float16)) as simulation:
        assert torch.equal(simulation.step(grads).update, grads[0])


# --- NaN and Inf ------------------------------------------------------------------------------------------------------

BAD_RANK, BAD_INDEX, BAD_NAME = 1, 130, "a.bias"


def spoiled(grads: Tensor, value: float) -> Tensor:
    grads = grads.clone()
    grads[BAD_RANK, BAD_INDEX] = value
    return grads


@grid(row=TABLE, value=[float("nan"), float("-inf")])
def test_stop_raises_on_all_ranks_and_keeps_nothing_of_it(row: Row, value: float) -> None:
    world_size, reducer = row.world_size(3), row.make(DENSITY, 0)
    states = [reducer.start(LAYOUT, torch.float64, torch.device("cpu")) for _ in range(world_size)]

    def reduce(comm: micro.Comm) -> str | None:
        comm.begin_step()
        try:
            reducer.reduce_(states[comm.rank], grads[comm.rank], comm)
        except micro.NonFiniteGradient as error:
            return str(error)
        return None

    with closing(SimulatedRanks(world_size)) as group:
        grads = gradients(LAYOUT, world_size, 0, torch.float64)
        assert group.run(reduce) == [None] * world_size
        grads = spoiled(gradients(LAYOUT, world_size, 1, torch.float64), value)
        waiting = None
        if states[0].residual.numel():
            kept = decay_of(reducer) * torch.stack([state.residual for state in states])
            waiting = sum_in_node(row, kept) + kept_of(grads, row)
        if momentum := momentum_of(reducer):
            waiting += momentum * torch.stack([state.memory["momentum"] for state in states])
        messages = group.run(reduce)

    assert len(set(messages)) == 1
    message = messages[0]
    assert message
    assert f"'{BAD_NAME}'" in message
    assert "at step 1" in message
    if row.names_rank:
        assert f"on rank {BAD_RANK}" in message
    if waiting is not None:  # nothing is sent, and what is finite is kept
        assert_waits(sum_in_node(row, torch.stack([state.residual for state in states])), waiting, reducer)


@grid(row=TABLE, value=[float("nan"), float("inf")])
def test_skip_leaves_the_step_out(row: Row, value: float) -> None:
    world_size = row.world_size(3)
    with closing(simulate(row, world_size, nonfinite="skip")) as simulation:
        take(simulation, gradients(LAYOUT, world_size, 0, torch.float64))
        usual = gradients(LAYOUT, world_size, 1, torch.float64)
        bad = take(simulation, spoiled(usual, value))
        good = take(simulation, gradients(LAYOUT, world_size, 2, torch.float64))

    assert not bad.updates.any()
    assert all(stats.skipped and stats.global_count == 0 for stats in bad.stats)
    if bad.after.numel():  # what is finite waits, what is not is dropped
        waiting = sum_in_node(row, bad.before) + kept_of(spoiled(usual, value), row)
        assert_waits(sum_in_node(row, bad.after), waiting, simulation.reducer)
    assert_replicas_equal(good.updates)
    assert torch.isfinite(good.updates).all()
    assert good.updates.any()
    assert not any(stats.skipped for stats in good.stats)
    assert [stats.step for stats in good.stats] == [2] * world_size
    if row.conserves_mass:
        assert_mass_conserved(row, good)


@grid(row=TABLE)
def test_policy_must_be_known(row: Row) -> None:
    with pytest.raises(ValueError, match="nonfinite must be one of stop, skip, got 'ignore'"):
        replace(row.make(DENSITY, 0), nonfinite="ignore")  # type: ignore[type-var]


# --- state ------------------------------------------------------------------------------------------------------------


def assert_same_run(one: list[Taken], other: list[Taken]) -> None:
    for a, b in zip(one, other, strict=True):
        assert same_bits(a.updates, b.updates)
        assert same_bits(a.after, b.after)
        for x, y in zip(a.stats, b.stats, strict=True):
            assert untimed(x) == untimed(y)


def untimed(stats: micro.StepStats) -> micro.StepStats:
    return replace(stats, spans=Spans())


@grid(row=TABLE)
def test_save_and_restore_equals_the_uninterrupted_run(row: Row) -> None:
    world_size, dtype = row.world_size(3), torch.float32
    grads = [gradients(LAYOUT, world_size, step, dtype) for step in range(7)]
    with closing(simulate(row, world_size, dtype=dtype)) as simulation:
        for step in range(3):
            take(simulation, grads[step])
        saved = simulation.state_dict()
        uninterrupted = [take(simulation, grads[step]) for step in range(3, 7)]
    with closing(simulate(row, world_size, dtype=dtype)) as resumed:
        resumed.load_state_dict(through_a_file(saved))
        assert_same_run(uninterrupted, [take(resumed, grads[step]) for step in range(3, 7)])


@grid(row=TABLE)
def test_same_seed_gives_the_same_bytes(row: Row) -> None:
    world_size = row.world_size(3)
    with closing(simulate(row, world_size)) as simulation:
        again = [take(simulation, gradients(LAYOUT, world_size, step, torch.float64)) for step in range(STEPS)]
    assert_same_run(taken(row, 3, torch.float64), again)


@grid(row=TABLE)
def test_only_random_methods_depend_on_the_seed(row: Row) -> None:
    world_size = row.world_size(3)
    with closing(simulate(row, world_size, seed=1)) as simulation:
        step = take(simulation, gradients(LAYOUT, world_size, 0, torch.float64))
    first = taken(row, 3, torch.float64)[0]
    assert torch.equal(step.updates != 0, first.updates != 0) == (not row.seeded)


@grid(row=TABLE)
def test_rebuild_in_another_order_keeps_every_residual_by_name(row: Row) -> None:
    world_size = row.world_size(3)
    turned = micro.Layout(LAYOUT.names[::-1], LAYOUT.shapes[::-1])
    with closing(simulate(row, world_size)) as simulation:
        for step in range(2):
            last = take(simulation, gradients(LAYOUT, world_size, step, torch.float64))
        simulation.rebuild(turned)
        for rank, residual in enumerate(simulation.residuals()):
            for name, piece in turned.split(residual).items():
                assert same_bits(piece, LAYOUT.split(last.after[rank])[name])
        step_after = take(simulation, gradients(turned, world_size, 2, torch.float64))
    assert_replicas_equal(step_after.updates)
    assert [stats.step for stats in step_after.stats] == [2] * world_size
    if row.conserves_mass:
        assert_mass_conserved(row, step_after)


# --- what only some rows promise --------------------------------------------------------------------------------------


@pytest.mark.slow
@grid(row=[row for row in SEEDED if not row.conserves_mass])
def test_without_feedback_the_mean_over_seeds_is_the_dense_mean(row: Row) -> None:
    world_size, draws = 2, 500
    layout = micro.Layout.flat(40)
    grads = gradients(layout, world_size, 0, torch.float64)
    group, drawn = SimulatedRanks(world_size), torch.empty(draws, layout.numel, dtype=torch.float64)
    with closing(group):

        def reduce(comm: micro.Comm) -> None:
            for seed in range(draws):
                reducer = row.make(0.25, seed)
                mine = grads[comm.rank].clone()
                reducer.reduce_(reducer.start(layout, torch.float64, mine.device), mine, comm)
                if comm.rank == 0:
                    drawn[seed] = mine

        group.run(reduce)
    dense = grads.mean(0)
    standard_error = drawn.std(0) / draws**0.5
    assert ((drawn.mean(0) - dense).abs() <= 4 * standard_error).all()
    assert (standard_error > 0).all()


@grid(row=SEEDED)
def test_random_indices_change_from_step_to_step(row: Row) -> None:
    for earlier, later in pairwise(taken(row, 3, torch.float64)):
        assert not torch.equal(earlier.updates[0] != 0, later.updates[0] != 0)


def test_names_of_the_table_are_unique() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


def test_every_selector_has_a_row() -> None:
    reducers = [row.make(DENSITY, 0) for row in TABLE]
    used = {reducer.selector.name for reducer in reducers if isinstance(reducer, micro.SparseReducer)}
    assert used == set(micro.known(micro.Selector))
