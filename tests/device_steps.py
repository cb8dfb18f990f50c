"""Steps of a method on the fake device and on the CPU, which are to give the same bits."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch

from experiments.config.builders import build_reducer
from experiments.config.compose import compose_run
from micro.comm import Comm
from micro.flat import Layout
from micro.kernels import table
from micro.lockstep import SimulatedRanks
from micro.requests import Reduction
from micro.stats import StepStats
from tests.fake_device import DEVICE, DeviceTensor, fake_device
from tests.recorded_streams import recorded_streams

LAYOUT = Layout(("matrix", "vector", "last"), ((40, 50), (1500,), (500,)))
FIXED = ["density=0.05", "optimizer.momentum=0", "cluster.nproc_per_node=2"]
Outcome = tuple[list[float], list[float], tuple[int, ...], int]
"""Update, residual, counts and number of updated elements of a step."""


def outcomes(method: str, group: SimulatedRanks, scales: list[float], *, on_device: bool) -> list[list[Outcome]]:
    """Return what each rank has after each step; see `steps_of`."""
    return [[outcome for outcome, _ in steps] for steps in steps_of(method, group, scales, on_device=on_device)]


def steps_of(
    method: str, group: SimulatedRanks, scales: list[float], *, on_device: bool, more: tuple[str, ...] = ()
) -> list[list[tuple[Outcome, StepStats]]]:
    """Return what each rank has after each step, the gradients of which are multiplied by ``scales``, and its record.

    Plain torch does all the work, on the fake device or on the CPU.

    Args:
        more: settings of the method.
    """
    reducer = build_reducer(compose_run([f"sparsifier={method}", *FIXED, *more]))

    def placed(values: torch.Tensor) -> Any:
        return DeviceTensor(values) if on_device else values

    def steps(comm: Comm) -> Reduction[list[tuple[Outcome, StepStats]]]:
        device, found = DEVICE if on_device else torch.device("cpu"), []
        randomness = torch.Generator().manual_seed(comm.rank)
        reducer.prepare(comm, device)
        state = reducer.start(LAYOUT, torch.float32, device)
        for scale in scales:
            comm.begin_step()
            grad = placed(torch.randn(LAYOUT.numel, generator=randomness) * scale)
            stats = yield from reducer.step(state, grad, comm)
            outcome = grad.tolist(), state.residual.tolist(), stats.counts, stats.global_count
            found.append((outcome, stats))
        return found

    with no_kernels(), recorded_streams(), torch.no_grad(), fake_device() if on_device else nullcontext():
        return group.carry_out([steps(comm) for comm in group.comms])


def no_kernels() -> Any:
    """Leave all work to plain torch."""
    return patch.object(table, "TRIED", ())
