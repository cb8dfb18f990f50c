"""The same as `library`, for revisions that have none: as the library was at 3501483. It runs with their code."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.studies.gradient_sources import fitting_scale, layered
from experiments.studies.methods import build_methods
from micro import kernels

TIMES = ("select_s", "rest_s", "exchange_s", "bytes_sent", "build_up")


def prepare() -> None:
    """Load the compiled loops; where they must be compiled first, one rank does it for all."""
    if dist.get_rank():
        dist.barrier()
    kernels.prepare()
    if not dist.get_rank():
        dist.barrier()


def scale(density: float, numel: int) -> float:
    """Return the scale of normal gradients that suits methods whose threshold is a setting."""
    return fitting_scale(density, numel)


def reduction(method: str, density: float, numel: int, device: torch.device) -> Callable[[Tensor], dict[str, float]]:
    """Return a step of a method of conf/sparsifier, which puts the update in a gradient's place, with its times."""
    from micro.comm import GroupComm  # type: ignore[attr-defined]  # where those revisions have it

    reducer = build_methods([method], density)[method]
    comm, state = GroupComm(), reducer.start(layered(numel), torch.float32, device)

    def step(grad: Tensor) -> dict[str, float]:
        comm.begin_step()
        stats = reducer.reduce_(state, grad, comm)
        return {key: getattr(stats, key) for key in TIMES}

    return step
