"""Where the tests of this folder run: on GPUs if there are enough, and, to show that they are right, on the CPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.dist.ddp_steps import ON_GPUS, device
from tests.dist.processes import ranks


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks over a backend, with tensors on a device."""

    world_size: int
    backend: str
    device: str

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``work(*args)`` on every rank, whose device is the current one; return the results in rank order."""
        return ranks(self.world_size, self.backend).run(_on, self.device, work, args)


def _on(where: str, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if where == "cpu":
        return work(*args)
    os.environ[ON_GPUS] = "1"
    try:
        torch.cuda.set_device(device())
        return work(*args)
    finally:
        del os.environ[ON_GPUS]
        torch.cuda.synchronize()


def place(world_size: int, backend: str, where: str) -> Any:
    """Return a parameter of a test: skipped where there is no GPU, or over NCCL not one for each rank."""
    needed = 0 if where == "cpu" else world_size if backend == "nccl" else 1
    there = torch.cuda.device_count()
    marks = [
        pytest.mark.skipif(there < needed, reason=f"needs {needed} GPUs, there are {there}"),
        pytest.mark.timeout(600),
    ]
    if needed:
        marks.append(pytest.mark.gpu)
    return pytest.param(Place(world_size, backend, where), marks=marks, id=f"{world_size} {backend} {where}")


ON_CPU = place(2, "gloo", "cpu")
SHARED = [place(size, "gloo", "cuda") for size in (2, 4)]
NCCL = place(2, "nccl", "cuda")
ALONE = [place(1, "gloo", "cpu"), place(1, "nccl", "cuda")]


def contexts() -> list[int]:
    """Return the GPUs on which this process has a context."""
    return [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]


def memory() -> int:
    """Return the bytes that this rank's tensors take on its GPU."""
    return torch.cuda.memory_allocated() if device().type == "cuda" else 0
