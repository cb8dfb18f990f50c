"""Adapter of `method_steps` to this revision of the library: steps of a method, and suitable gradients."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.tools.shared.gradient_sources import fitting_scale, layered
from experiments.tools.shared.methods import build_methods
from micro.comm.group import GroupComm
from micro.kernels import preparing

Step = Callable[[Tensor], dict[str, float]]


def prepare() -> None:
    """Load the compiled loops; if they must be compiled first, one rank does it for all."""
    if dist.get_rank():
        dist.barrier()
    preparing.prepare()
    if not dist.get_rank():
        dist.barrier()


def scale(density: float, numel: int) -> float:
    """Return the scale of normal gradients that suits methods whose threshold is a setting."""
    return fitting_scale(density, numel)


def reduction(method: str, density: float, numel: int, device: torch.device) -> Step:
    """Return a step function of a method of conf/sparsifier: it replaces a gradient (numel,) by the update.

    It keeps the method's state, and returns times in seconds of this rank.
    """
    reducer = build_methods([method], density)[method]
    comm, state = GroupComm(timed=True), reducer.start(layered(numel), torch.float32, device)

    def step(grad: Tensor) -> dict[str, float]:
        comm.begin_step()
        stats = reducer.reduce_(state, grad, comm)
        return {
            "select_s": stats.select_s,
            "rest_s": stats.rest_s,
            "exchange_s": stats.exchange_s,
            "bytes_sent": stats.bytes_sent,
            "build_up": stats.build_up,
        }

    return step
