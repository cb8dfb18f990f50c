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

NUM_STEPS, NUMEL, WORLD_SIZE = 5, 1009, 3
DENSITY = 0.05
ROWS = {row.name: row for row in TABLE if row.ranks_per_node == 1}  # nodes of several: test_two_level_ranks.py
"""By name: a row holds functions without a name, which do not travel to a process."""

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


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


def reduce_here(name: str, dtype: torch.dtype, steps: int) -> list[tuple[Tensor, Tensor, micro.StepStats]]:
    """Return, per step, this rank's copy of the update, its residual and its statistics."""
    reducer, comm = ROWS[name].make(DENSITY, 0), GroupComm()
    state = reducer.start(micro.Layout.flat(NUMEL), dtype, torch.device("cpu"))
    outcomes = []
    for rows in islice(all_gradients(NUMEL, comm.world_size, dtype), steps):
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
    return str(caught.value)


def all_here(name: str) -> tuple[Any, Any, str]:
    """Return what comes of all steps, of the first two in half precision, and of a NaN."""
    whole, half = reduce_here(name, torch.float64, NUM_STEPS), reduce_here(name, torch.bfloat16, 2)
    words = nan_here(name)
    dist.barrier()
    return whole, half, words


def what_all_share(stats: micro.StepStats) -> tuple[Any, ...]:
    return stats.step, stats.rule, stats.target_count, stats.counts, stats.global_count, stats.skipped


def what_was_sent(stats: micro.StepStats) -> tuple[float, ...]:
    return stats.counts_bytes, stats.indices_bytes, stats.values_bytes, stats.num_collectives


@pytest.mark.parametrize("name", ROWS)
def test_processes_equal_the_simulation_and_each_other(name: str) -> None:
    """Lists of nothing are sent too, where a gradient is zero."""
    processes = ranks(WORLD_SIZE).run(all_here, name)
    simulation = micro.Simulation(
        ROWS[name].make(DENSITY, 0), micro.Layout.flat(NUMEL), WORLD_SIZE, dtype=torch.float64
    )
    for step, rows in enumerate(all_gradients(NUMEL, WORLD_SIZE, torch.float64)):
        expected = simulation.step(rows, residuals=True)
        assert expected.residuals is not None
        for rank, (whole, _, _) in enumerate(processes):
            update, residual, stats = whole[step]
            assert torch.equal(update, processes[0][0][step][0]), "replicas drift apart"
            assert torch.equal(update != 0, expected.update != 0), "other indices than in the simulation"
            torch.testing.assert_close(update, expected.update, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(residual, expected.residuals[rank], rtol=1e-11, atol=1e-13)
            assert what_all_share(stats) == what_all_share(expected.stats[rank])
            assert what_was_sent(stats) == what_was_sent(expected.stats[rank])
    (_, first, words), *others = processes
    for _, half, other_words in others:
        assert other_words == words
        for (update, _, stats), (first_update, _, first_stats) in zip(half, first, strict=True):
            assert torch.equal(update, first_update)
            assert what_all_share(stats) == what_all_share(first_stats)
    assert ("on rank 2" in words) == ROWS[name].names_rank
