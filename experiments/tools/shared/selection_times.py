"""Measure how long selection takes on a single rank."""

import time
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from torch import Tensor

import micro
from experiments.tools.shared.gradient_sources import fitting_scale, layered
from micro.comm.ranks import Comm
from micro.density.base import target_count
from micro.values.randomness import generator

WARM_UP_STEPS = 2
REPEATS = 15
WIDE = 0.5  # if quartiles are further apart, relative to the median, the machine was busy
TIMES = ("select_s", "select_s_low", "select_s_high")  # median, lower and upper quartile of seconds
TORCH_TOPK, ONE_READ = "torch.topk", "one read"  # references for selections


def timing_gradient(numel: int, density: float) -> Tensor:
    """Return normal gradients (numel,) for timing, with the scale of the drawn gradients."""
    return fitting_scale(density, numel) * torch.randn(numel, generator=generator(0, numel))


def reference_times(gradient: Tensor, density: float, repeats: int) -> dict[str, dict[str, float]]:
    """Return TIMES of torch.topk and of one read of ``gradient`` (numel,): its sum."""
    k = target_count(density, gradient.numel())
    return {TORCH_TOPK: time_topk(gradient, k, repeats), ONE_READ: timed(gradient.sum, repeats)}


def time_selection(reducer: micro.Reducer, gradient: Tensor, repeats: int) -> dict[str, float]:
    """Return TIMES of selection on a single rank; 0 if a method selects nothing."""
    comm = Comm()
    numel = gradient.numel()
    state = reducer.start(layered(numel), gradient.dtype, gradient.device)
    grad, seconds = torch.empty_like(gradient), []
    for step in range(WARM_UP_STEPS + repeats):
        shift = int(torch.randint(numel, (1,), generator=generator(step)))
        torch.cat([gradient[shift:], gradient[:shift]], out=grad)  # every position gets another value
        comm.begin_step()
        seconds.append(reducer.reduce_(state, grad, comm).select_s)
        if not seconds[-1]:
            return dict.fromkeys(TIMES, 0.0)
    return _quartiles(seconds[WARM_UP_STEPS:])


def time_topk(gradient: Tensor, k: int, repeats: int) -> dict[str, float]:
    """Return TIMES of torch.topk on the magnitudes of ``gradient`` (numel,)."""
    return timed(lambda: torch.topk(gradient.abs(), k, sorted=False), repeats)


def wide_spread(times: pd.DataFrame) -> list[str]:
    """Return a warning with the widest spread if one exceeds WIDE; columns method, numel, TIMES."""
    spread = (times["select_s_high"] - times["select_s_low"]) / times["select_s"]
    if not (spread > WIDE).any():
        return []
    worst = times.iloc[int(spread.argmax())]
    low, middle, high = (f"{1e3 * worst[column]:.3g}" for column in ("select_s_low", "select_s", "select_s_high"))
    return [
        f"times spread widely in {(spread > WIDE).sum()} of {len(times)} rows: {worst['method']}, d = "
        f"{worst['numel']:,}: median {middle} ms, quartiles {low} and {high} ms; measure again with nothing beside"
    ]


def timed(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return TIMES of ``work``."""
    seconds = []
    for _ in range(WARM_UP_STEPS + repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return _quartiles(seconds[WARM_UP_STEPS:])


def _quartiles(seconds: Sequence[float]) -> dict[str, float]:
    low, middle, high = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    return dict(zip(TIMES, map(float, (middle, low, high)), strict=True))
