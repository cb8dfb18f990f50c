"""Steps of a method on each rank, each timed with a floor beside it.

`experiments.bench step --against` copies this file into the older revision, so that both are measured alike: it uses
nothing that has not been in this code for long.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.launching.measurements import own_device, slowest
from experiments.studies.gradient_sources import fitting_scale, layered
from experiments.studies.methods import build_methods
from micro import kernels
from micro.comm import GroupComm
from micro.partition import equal_slice

WARMUP = 40  # the repaired rule searches while residuals fill up, and steers after
LEAST_WARMUP = 10
LEAST_STEPS = 5
NUM_TRIED = 4  # steps that tell how long one takes; the first of them loads or compiles loops
NUM_GRADIENTS = 3

Times = dict[str, float]
Step = Callable[[Tensor], Times]


class Counts(NamedTuple):
    """How many steps of a method are taken."""

    warmup: int
    counted: int


def counts(step_s: float, steps: int, limit_s: float) -> Counts:
    """Return how many steps fit into ``limit_s``, at most ``WARMUP`` and ``steps``; a slow method gets fewer."""
    affordable = int(limit_s / step_s)
    counted = min(steps, max(LEAST_STEPS, affordable // 4))
    return Counts(min(WARMUP, max(LEAST_WARMUP, affordable - counted)), counted)


class TimedSteps:
    """One step after the other on gradients that differ, each followed by a floor.

    Args:
        step: replaces a gradient (numel,) by its update; returns its times and sizes on this rank.
    """

    def __init__(self, step: Step, numel: int, density: float, device: torch.device) -> None:
        self.step = step
        self._device = device
        self._gradients = gradients(numel, density, device)
        self._grad = torch.empty_like(self._gradients[0])
        self._residual = torch.zeros_like(self._grad)
        self._comm = GroupComm()
        self._number = 0

    def take(self, count: int) -> list[Times]:
        """Return the times of so many steps and of their floors, those of the slowest rank, a dict per step."""
        return [self._one() for _ in range(count)]

    def tried(self) -> float:
        """Take a few steps; return the seconds of one, with all that is done between two."""
        self.take(1)
        began = time.perf_counter()
        self.take(NUM_TRIED - 1)
        return slowest(time.perf_counter() - began, self._device) / (NUM_TRIED - 1)

    def next_gradient(self) -> Tensor:
        """Return the gradient (numel,) of the next step, in the memory that all of them have."""
        _draw_(self._grad, self._gradients, self._number)
        self._number += 1
        return self._grad

    def _one(self) -> Times:
        grad = self.next_gradient()
        dist.barrier()
        row = self.step(grad)
        row["floor_s"] = self.floor()
        row["own_s"] = row["select_s"] + row["rest_s"]
        return {key: slowest(value, self._device) for key, value in row.items()}

    def floor(self) -> float:
        """Do what a sparse step cannot leave out; return its seconds on this rank."""
        residual, comm = self._residual, self._comm
        first, stop = equal_slice(residual.numel(), comm.world_size, comm.rank)
        dist.barrier()
        started = comm.now(self._device)
        residual.add_(self._gradients[0])
        residual[first:stop].sum()
        self._grad.zero_()
        return float(comm.now(self._device) - started)


def reduction(method: str, numel: int, density: float, device: torch.device) -> Step:
    """Return a step of a method of conf/sparsifier, with a state of its own."""
    prepare()
    reducer = build_methods([method], density)[method]
    comm, state = GroupComm(), reducer.start(layered(numel), torch.float32, device)

    def step(grad: Tensor) -> Times:
        comm.begin_step()
        started = comm.now(device)
        stats = reducer.reduce_(state, grad, comm)
        total_s = float(comm.now(device) - started)
        return {
            "select_s": stats.select_s,
            "rest_s": stats.rest_s,
            "exchange_s": stats.exchange_s,
            "total_s": total_s,
            "bytes_sent": stats.bytes_sent,
            "indices_bytes": stats.indices_bytes,
            "values_bytes": stats.values_bytes,
            "build_up": stats.build_up,
        }

    return step


def medians(taken: Sequence[Times]) -> Times:
    """Return the medians over steps, with those of the floors that a step took beside the wire, a ratio of each."""
    rows = [{**row, "floors": row["own_s"] / row["floor_s"]} for row in taken]
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


_steps: TimedSteps | None = None  # of this rank: they last from one call to the next


def begin(settings: Mapping[str, Any]) -> float:
    """Make the steps of a method at a length and density on this rank; return the seconds that one takes."""
    global _steps
    _steps, device = None, own_device()
    numel, density = settings["numel"], settings["density"]
    _steps = TimedSteps(reduction(settings["method"], numel, density, device), numel, density, device)
    return _steps.tried()


def turn(count: int) -> Times:
    """Take so many steps; return their medians."""
    assert _steps
    return medians(_steps.take(count))


@cache
def prepare() -> None:
    """Load the loops that most methods need; where they must be compiled first, one rank does it for all."""
    if dist.get_rank():
        dist.barrier()
    kernels.prepare()
    if not dist.get_rank():
        dist.barrier()


@lru_cache(maxsize=1)
def gradients(numel: int, density: float, device: torch.device) -> list[Tensor]:
    """Return what all methods are measured on: normal gradients of this rank."""
    randomness = torch.Generator().manual_seed(dist.get_rank())
    scale = fitting_scale(density, numel)
    return [scale * torch.randn(numel, generator=randomness).to(device) for _ in range(NUM_GRADIENTS)]


def _draw_(grad: Tensor, gradients: list[Tensor], step: int) -> None:
    """Fill ``grad`` with a gradient that no earlier step had: one of a few, turned by a random number of places."""
    source = gradients[step % len(gradients)]
    turn = int(torch.randint(1, source.numel(), (1,), generator=torch.Generator().manual_seed(step)))
    grad[:turn].copy_(source[-turn:])
    grad[turn:].copy_(source[:-turn])
