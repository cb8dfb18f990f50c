"""Every method of THE TABLE on real gloo processes: the same as in the simulation, on all ranks alike."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import micro
from micro.group_comm import GroupComm
from tests.dist.processes import ranks
from tests.sparsifiers import TABLE

NUM_STEPS = 5
DENSITY = 0.05
ROWS = {row.name: row for row in TABLE if row.ranks_per_node == 1}  # nodes of several: test_two_level_ranks.py
"""By name: a row holds functions without a name, which do not travel to a process."""

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
over_methods = pytest.mark.parametrize("name", ROWS)


def all_gradients(numel: int, world_size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield (world_size, numel) per step: of a new scale each time, all zero once, zero on the last rank once."""
    for step in range(NUM_STEPS):
        rows = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        rows *= 3.0**step
        if step == 2:
            rows.zero_()
        if step == 3:
            rows[-1] = 0
        yield rows.to(dtype)


def reduce_here(
    name: str, numel: int, dtype: torch.dtype, steps: int = NUM_STEPS
) -> list[tuple[Tensor, Tensor, micro.StepStats]]:
    """Return, per step, this rank's copy of the update, its residual and its statistics."""
    reducer, comm = ROWS[name].make(DENSITY, 0), GroupComm()
    state = reducer.start(micro.Layout.flat(numel), dtype, torch.device("cpu"))
    outcomes = []
    for rows in islice(all_gradients(numel, comm.world_size, dtype), steps):
        grad = rows[comm.rank].clone()
        comm.begin_step()
        stats = reducer.reduce_(state, grad, comm)
        outcomes.append((grad, state.residual.clone(), stats))
    return outcomes


def nan_here(name: str) -> str:
    """Return the words with which a NaN on the last rank stops this one."""
    reducer, comm = ROWS[name].make(DENSITY, 0), GroupComm()
    state = reducer.start(micro.Layout.flat(100), torch.float32, torch.device("cpu"))
    grad = torch.ones(100)
    if comm.rank == comm.world_size - 1:
        grad[7] = float("nan")
    comm.begin_step()
    with pytest.raises(micro.NonFiniteGradient) as caught:
        reducer.reduce_(state, grad, comm)
    dist.barrier()
    return str(caught.value)


def what_all_share(stats: micro.StepStats) -> tuple[Any, ...]:
    return stats.step, stats.rule, stats.target_count, stats.counts, stats.global_count, stats.skipped


def what_was_sent(stats: micro.StepStats) -> tuple[float, ...]:
    return stats.counts_bytes, stats.indices_bytes, stats.values_bytes, stats.num_collectives


@over_methods
def test_processes_equal_the_simulation(name: str) -> None:
    """Lists of nothing are sent too, where a gradient is zero."""
    numel, world_size = 1009, 3
    processes = ranks(world_size).run(reduce_here, name, numel, torch.float64)
    simulation = micro.Simulation(
        ROWS[name].make(DENSITY, 0), micro.Layout.flat(numel), world_size, dtype=torch.float64
    )
    for step, rows in enumerate(all_gradients(numel, world_size, torch.float64)):
        expected = simulation.step(rows, residuals=True)
        assert expected.residuals is not None
        for rank, outcomes in enumerate(processes):
            update, residual, stats = outcomes[step]
            assert torch.equal(update, processes[0][step][0]), "replicas drift apart"
            assert torch.equal(update != 0, expected.update != 0), "other indices than in the simulation"
            torch.testing.assert_close(update, expected.update, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(residual, expected.residuals[rank], rtol=1e-11, atol=1e-13)
            assert what_all_share(stats) == what_all_share(expected.stats[rank])
            assert what_was_sent(stats) == what_was_sent(expected.stats[rank])
    simulation.close()


@over_methods
def test_replicas_of_half_precision_are_equal_bit_for_bit(name: str) -> None:
    first, *others = ranks(3).run(reduce_here, name, 1009, torch.bfloat16, 2)
    for other in others:
        for (update, _, stats), (expected, _, first_stats) in zip(other, first, strict=True):
            assert torch.equal(update, expected)
            assert what_all_share(stats) == what_all_share(first_stats)


@over_methods
def test_a_nan_stops_all_processes(name: str) -> None:
    words = ranks(3).run(nan_here, name)
    assert len(set(words)) == 1
    assert ("on rank 2" in words[0]) == ROWS[name].names_rank
