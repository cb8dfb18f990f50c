"""Every method of THE TABLE on real gloo processes: equal on all ranks, and equal to the simulation."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import micro
from micro.comm.group import GroupComm
from tests.dist.ddp_steps import device, words_of
from tests.dist.processes import ranks
from tests.sparsifiers import TABLE

NUM_STEPS, NUMEL, DENSITY = 5, 1009, 0.05
ROWS = {row.name: row for row in TABLE}  # a row holds functions without a name, which do not travel to a process

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
StepRecord = tuple[Tensor, Tensor, micro.StepStats]  # the update, the residual after it, and the statistics


def all_gradients(numel: int, world_size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield (world_size, numel) per step: of a new scale each time, all zero once, zero on the last rank once."""
    for step in range(NUM_STEPS):
        rows = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        rows *= 0.0 if step == 2 else 3.0**step
        if step == 3:
            rows[-1] = 0
        yield rows.to(dtype)


def reduce_here(name: str, dtype: torch.dtype, steps: int) -> list[StepRecord]:
    """Return what this rank has of each step."""
    reducer, comm = ROWS[name].make(DENSITY, 0), GroupComm()
    reducer.prepare(comm, device())
    state = reducer.start(micro.Layout.flat(NUMEL), dtype, device())
    outcomes = []
    for rows in islice(all_gradients(NUMEL, comm.world_size, dtype), steps):
        grad = rows[comm.rank].to(device(), copy=True)
        comm.begin_step()
        stats = reducer.reduce_(state, grad, comm)
        outcomes.append((grad.cpu(), state.residual.to("cpu", copy=True), stats))
    comm.close()
    return outcomes


def nan_here(name: str) -> str:
    """Return the words with which a NaN on the last rank stops this one."""
    reducer, comm = ROWS[name].make(DENSITY, 0), GroupComm()
    state = reducer.start(micro.Layout.flat(100), torch.float32, torch.device("cpu"))
    grad = torch.ones(100)
    grad[7] = float("nan") if comm.rank == comm.world_size - 1 else 1.0
    comm.begin_step()
    words = words_of(micro.NonFiniteGradient, lambda: reducer.reduce_(state, grad, comm))
    comm.close()
    return words


def all_here(name: str) -> tuple[list[StepRecord], list[StepRecord], str]:
    """Return what comes of all steps, of the first two in half precision, and of a NaN."""
    whole, half = reduce_here(name, torch.float64, NUM_STEPS), reduce_here(name, torch.bfloat16, 2)
    words = nan_here(name)
    dist.barrier()
    return whole, half, words


def what_all_share(stats: micro.StepStats) -> tuple[Any, ...]:
    return stats.step, stats.rule, stats.target_count, stats.counts, stats.global_count, stats.skipped


def what_one_sent(stats: micro.StepStats) -> tuple[Any, ...]:
    return (
        stats.counts_bytes,
        stats.indices_bytes,
        stats.values_bytes,
        stats.local_bytes,
        stats.calls,
        stats.local_calls,
    )


@pytest.mark.parametrize("name", ROWS)
def test_processes_equal_the_simulation_and_each_other(name: str) -> None:
    """Lists of nothing are sent too, where a gradient is zero."""
    row, world_size = ROWS[name], ROWS[name].world_size(3)
    processes = ranks(world_size).run(all_here, name)
    simulation = micro.Simulation(row.make(DENSITY, 0), micro.Layout.flat(NUMEL), world_size, dtype=torch.float64)
    for step, rows in enumerate(all_gradients(NUMEL, world_size, torch.float64)):
        expected = simulation.step(rows, residuals=True)
        for rank, (whole, _, _) in enumerate(processes):
            update, residual, stats = whole[step]
            assert torch.equal(update, processes[0][0][step][0]), "replicas drift apart"
            assert torch.equal(update != 0, expected.update != 0), "other indices than in the simulation"
            torch.testing.assert_close(update, expected.update, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(residual, expected.residuals[rank], rtol=1e-11, atol=1e-13)
            assert what_all_share(stats) == what_all_share(expected.stats[rank])
            assert what_one_sent(stats) == what_one_sent(expected.stats[rank])
    (_, first, words), *others = processes
    for _, half, other_words in others:
        assert other_words == words
        for (update, _, stats), (first_update, _, first_stats) in zip(half, first, strict=True):
            assert torch.equal(update, first_update)
            assert what_all_share(stats) == what_all_share(first_stats)
    assert (f"on rank {world_size - 1}" in words) == row.promises.names_rank
