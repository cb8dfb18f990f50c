"""Run and time steps of a method on a rank, each with its floor.

`profile select`, the doctor, `bench step` and `bench gpu` all use it. ``bench step --against`` copies this file into
the older revision to measure both in the same way, so it imports only `library` from this repository.
"""

import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.tools.profile import library

TOPK = "(torch.topk alone)"  # listed with the methods, for comparison
NUM_TRIED = 4  # steps to estimate the duration of one; the first loads or compiles loops
NUM_GRADIENTS = 3

Times = dict[str, float]
Step = Callable[[Tensor], Times]


class TimedSteps:
    """Runs steps on changing gradients, each followed by a floor."""

    def __init__(self, method: str, numel: int, density: float, device: torch.device) -> None:
        self._device = device
        self._gradients = gradients(numel, library.scale(density, numel), device)
        self.step = self._topk(density) if method == TOPK else library.reduction(method, density, numel, device)
        self._grad = torch.empty_like(self._gradients[0])
        self._residual = torch.zeros_like(self._grad)
        self._number = 0

    def take(self, count: int) -> list[Times]:
        """Return the times of so many steps and of their floors on this rank, a dict per step."""
        return [self._one() for _ in range(count)]

    def next_gradient(self) -> Tensor:
        """Return a new gradient (numel,), always in the same memory.

        It is one of a few gradients, rotated by a random number of elements.
        """
        source, grad = self._gradients[self._number % NUM_GRADIENTS], self._grad
        turn = int(torch.randint(1, source.numel(), (1,), generator=torch.Generator().manual_seed(self._number)))
        grad[:turn].copy_(source[-turn:])
        grad[turn:].copy_(source[:-turn])
        self._number += 1
        return grad

    def floor(self) -> None:
        """Do the minimum of a sparse step: add the gradient, read the rank's slice, clear the gradient."""
        residual, rank, n = self._residual, dist.get_rank(), dist.get_world_size()
        residual.add_(self._gradients[0])
        residual[rank * residual.numel() // n : (rank + 1) * residual.numel() // n].sum()
        self._grad.zero_()

    def _one(self) -> Times:
        grad = self.next_gradient()
        row, total_s = self._timed(lambda: self.step(grad))
        _, floor_s = self._timed(self.floor)
        return {**row, "own_s": row["select_s"] + row["rest_s"], "total_s": total_s, "floor_s": floor_s}

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        dist.barrier()
        started = self._now()
        value = work()
        return value, self._now() - started

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _topk(self, density: float) -> Step:
        """Return a step of torch.topk alone, which sends nothing."""
        gradient = self._gradients[0]
        k = max(1, round(density * gradient.numel()))

        def step(grad: Tensor) -> Times:
            started = self._now()
            torch.topk(gradient.abs(), k, sorted=False)
            others = dict.fromkeys(("rest_s", "exchange_s", "bytes_sent", "build_up"), 0.0)
            return {"select_s": self._now() - started, **others}

        return step


current: TimedSteps | None = None  # this rank's steps, kept between calls


def begin(method: str, numel: int, density: float) -> float:
    """Prepare steps of a method at a length and density on this rank; return the seconds of one."""
    global current
    current = None  # first free its memory
    _prepare()
    current = TimedSteps(method, numel, density, _own_device())
    current.take(1)
    began = time.perf_counter()
    current.take(NUM_TRIED - 1)
    return (time.perf_counter() - began) / (NUM_TRIED - 1)


def turn(count: int) -> list[Times]:
    """Run ``count`` steps; return their times on this rank."""
    assert current
    return current.take(count)


@cache
def _prepare() -> None:
    library.prepare()


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


@lru_cache(maxsize=1)
def gradients(numel: int, scale: float, device: torch.device) -> list[Tensor]:
    """Return this rank's normal gradients, on which all methods are measured."""
    randomness = torch.Generator().manual_seed(dist.get_rank())
    return [scale * torch.randn(numel, generator=randomness).to(device) for _ in range(NUM_GRADIENTS)]
