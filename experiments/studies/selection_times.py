"""How long one rank, alone, takes to choose the indices that it sends."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import micro
from experiments.studies.gradient_sources import fitting_scale, layered
from micro.density.base import target_count
from micro.randomness import generator

WARM_UP_STEPS = 2
TORCH_TOPK, ONE_READ = "torch.topk", "one read"  # names of the times that selections are compared with


def timing_gradient(numel: int, density: float) -> Tensor:
    """Return normal gradients (numel,) to time a selection on, with the scale of the drawn gradients."""
    return fitting_scale(density, numel) * torch.randn(numel, generator=generator(0, numel))


def reference_times(gradient: Tensor, density: float) -> dict[str, float]:
    """Return the median seconds of torch.topk and of one read of ``gradient`` (numel,)."""
    return {TORCH_TOPK: time_topk(gradient, target_count(density, gradient.numel())), ONE_READ: time_read(gradient)}


def time_selection(reducer: micro.Reducer, gradient: Tensor, repeats: int) -> float:
    """Return the median seconds that one rank, alone, takes to choose indices; 0 where a method chooses none."""
    comm = micro.SoloComm()
    numel = gradient.numel()
    state = reducer.start(layered(numel), gradient.dtype, gradient.device)
    grad, seconds = torch.empty_like(gradient), []
    for step in range(WARM_UP_STEPS + repeats):
        shift = int(torch.randint(numel, (1,), generator=generator(step)))
        torch.cat([gradient[shift:], gradient[:shift]], out=grad)  # other values in each place than in earlier steps
        comm.begin_step()
        seconds.append(reducer.reduce_(state, grad, comm).select_s)
        if not seconds[-1]:
            return 0.0
    return statistics.median(seconds[WARM_UP_STEPS:])


def time_topk(gradient: Tensor, k: int) -> float:
    """Return the median seconds of torch.topk on the magnitudes of ``gradient`` (numel,)."""
    return _median_seconds(lambda: torch.topk(gradient.abs(), k, sorted=False), 3)


def time_read(gradient: Tensor) -> float:
    """Return the median seconds of one read of ``gradient`` (numel,): its sum."""
    return _median_seconds(gradient.sum, 9)


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
