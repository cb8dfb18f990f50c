"""What each rank of `experiments.bench step` does: time the steps of one method, and a floor beside each of them."""

import statistics
import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.benchmarks.passes import count_passes
from experiments.launching.measurements import Row, Settings, own_device, slowest_of_each
from experiments.studies.gradient_sources import fitting_scale, layered
from experiments.studies.methods import build_methods
from micro import kernels
from micro.comm import GroupComm
from micro.density.base import target_count
from micro.partition import equal_slice

TOPK = "(torch.topk alone)"  # stands beside the methods, for scale
WARMUP = 40  # the repaired rule searches while residuals fill up, and steers after
LEAST_WARMUP = 10
LEAST_STEPS = 5
NUM_TRIED = 4  # steps that tell how long one takes; the first of them loads or compiles loops
NUM_GRADIENTS = 3
QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)

Step = Callable[[Tensor], dict[str, float]]


class Counts(NamedTuple):
    """How many steps of a method are taken."""

    warmup: int
    counted: int


def counts(step_s: float, steps: int, limit_s: float) -> Counts:
    """Return how many steps fit into ``limit_s``, at most ``WARMUP`` and ``steps``; a slow method gets fewer."""
    affordable = int(limit_s / step_s)
    counted = min(steps, max(LEAST_STEPS, affordable // 4))
    return Counts(min(WARMUP, max(LEAST_WARMUP, affordable - counted)), counted)


def work(settings: Settings) -> Row:
    """Measure one method at one length and density: a row of medians over steps."""
    device, numel, density, method = own_device(), settings["numel"], settings["density"], settings["method"]
    _prepare_once()
    gradients = _gradients(numel, density, device)
    if method == TOPK:
        passes, step = _topk_alone(gradients[0], target_count(density, numel))
    else:
        passes, step = _reduction(method, density, numel, device)
    grad, residual = torch.empty_like(gradients[0]), torch.zeros_like(gradients[0])
    comm = GroupComm()

    def timed(number: int) -> dict[str, float]:
        _draw_(grad, gradients, number)
        dist.barrier()
        row = step(grad)
        row["floor_s"] = _floor(residual, gradients[0], grad, comm)
        return slowest_of_each({**row, "own_s": row["select_s"] + row["rest_s"]}, device)

    timed(0)
    began = time.perf_counter()
    for number in range(1, NUM_TRIED):
        timed(number)
    tried = slowest_of_each({"s": time.perf_counter() - began}, device)
    warmup, counted = counts(tried["s"] / (NUM_TRIED - 1), settings["steps"], settings["limit_s"])
    taken = [timed(number) for number in range(NUM_TRIED, warmup + counted)][-counted:]
    _draw_(grad, gradients, warmup + counted)
    visited = slowest_of_each({"passes": passes(grad)}, device)
    return {**_medians(taken), **visited, "warmup": warmup, "counted": counted}


def _medians(taken: list[dict[str, float]]) -> Row:
    """Return the medians over steps, and the median and the quartiles of floors, a ratio of each step."""
    floors = [row["own_s"] / row["floor_s"] for row in taken]
    quartiles = torch.tensor(floors, dtype=torch.float64).quantile(QUARTILES).tolist()
    row: Row = {key: statistics.median(one[key] for one in taken) for key in taken[0] if key != "own_s"}
    return row | dict(zip(("floors_q1", "floors", "floors_q3"), quartiles, strict=True))


def _reduction(method: str, density: float, numel: int, device: torch.device) -> tuple[Callable[[Tensor], float], Step]:
    """Return what counts the passes of a method's step, and what takes one, with its times and sizes."""
    reducer = build_methods([method], density)[method]
    comm, state = GroupComm(), reducer.start(layered(numel), torch.float32, device)

    def step(grad: Tensor) -> dict[str, float]:
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

    return lambda grad: count_passes(lambda: step(grad), numel), step


def _topk_alone(gradient: Tensor, k: int) -> tuple[Callable[[Tensor], float], Step]:
    """Return the same for torch.topk itself, which nothing is sent after."""
    comm, none = GroupComm(), ("rest_s", "exchange_s", "bytes_sent", "indices_bytes", "values_bytes", "build_up")

    def step(grad: Tensor) -> dict[str, float]:
        started = comm.now(gradient.device)
        torch.topk(gradient.abs(), k, sorted=False)
        elapsed_s = float(comm.now(gradient.device) - started)
        return {"select_s": elapsed_s, "total_s": elapsed_s, **dict.fromkeys(none, 0.0)}

    return lambda grad: count_passes(lambda: step(grad), gradient.numel()), step


@cache
def _prepare_once() -> None:
    kernels.prepare()


@lru_cache(maxsize=1)
def _gradients(numel: int, density: float, device: torch.device) -> list[Tensor]:
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


def _floor(residual: Tensor, gradient: Tensor, grad: Tensor, comm: GroupComm) -> float:
    first, stop = equal_slice(residual.numel(), comm.world_size, comm.rank)
    dist.barrier()
    started = comm.now(residual.device)
    residual.add_(gradient)
    residual[first:stop].sum()
    grad.zero_()
    return float(comm.now(residual.device) - started)
