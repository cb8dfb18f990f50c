"""Steps on an accelerator give the bits of steps on a CPU: a fake device, on which plain torch does all the work."""

import math
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from experiments.config.builders import build_reducer
from experiments.config.compose import compose_run
from micro.comm import Comm
from micro.flat import Layout
from micro.kernels import table
from micro.lockstep import SimulatedRanks
from micro.requests import Reduction
from tests.fake_device import DEVICE, DeviceTensor, fake_device
from tests.recorded_streams import recorded_streams

LAYOUT = Layout(("matrix", "vector", "last"), ((40, 50), (1500,), (500,)))
FIXED = ["density=0.05", "optimizer.momentum=0", "cluster.nproc_per_node=2"]
CHANGING = [1.0, 1.0, 1.0, 1.0, 100.0, 1.0, 1e-3, 1.0]  # guesses from the last step are far off
ZERO_AND_NAN = [1.0, 1.0, 1.0, 0.0, 1.0, math.nan, 1.0, 1.0]
NAN = [1.0, math.nan, 1.0, 1.0]
SKIP, MOMENTUM = "nonfinite=skip", "sparsifier.feedback={name: momentum}"
ROWS: list[tuple[str, str | None, list[float]]] = [
    *((method, None, CHANGING) for method in ("micro", "micro_repaired", "micro_slack", "micro_tensors")),
    *((method, None, CHANGING) for method in ("micro_scaled_elements", "exdyna", "gaussiank", "sidco", "redsync")),
    *((method, None, CHANGING) for method in ("dgc", "sage", "threshold", "gtopk", "gtopk_published")),
    *((method, None, CHANGING) for method in ("dsa", "dsa_published", "oktopk")),
    *((method, MOMENTUM, CHANGING) for method in ("gtopk", "gtopk_published", "dsa_published", "oktopk")),
    *((method, SKIP, ZERO_AND_NAN) for method in ("gaussiank", "redsync", "sage", "threshold", "dsa", "oktopk")),
    ("dsa", "density=0.5", [1.0] * 4),  # sums are dense
    *((method, SKIP, NAN) for method in ("demo", "fft", "fft_feedback", "powersgd")),  # the mean is undone
]
Outcome = tuple[list[float], list[float], tuple[int, ...], int, bool]
"""Update, residual, counts, number of updated elements of a step, and whether it was skipped."""


@pytest.fixture(scope="module")
def group() -> Iterator[SimulatedRanks]:
    """Give two ranks, each of which does all of its work itself."""
    with closing(SimulatedRanks(2, shares=False)) as ranks:
        yield ranks


def outcomes(
    settings: list[str], group: SimulatedRanks, scales: list[float], *, on_device: bool
) -> list[list[Outcome]]:
    """Return what each rank has after each step, the gradients of which are multiplied by ``scales``."""
    reducer = build_reducer(compose_run([*FIXED, *settings]))

    def placed(values: torch.Tensor) -> Any:
        return DeviceTensor(values) if on_device else values

    def steps(comm: Comm) -> Reduction[list[Outcome]]:
        device, found = DEVICE if on_device else torch.device("cpu"), []
        randomness = torch.Generator().manual_seed(comm.rank)
        reducer.prepare(comm, device)
        state = reducer.start(LAYOUT, torch.float32, device)
        for scale in scales:
            comm.begin_step()
            grad = placed(torch.randn(LAYOUT.numel, generator=randomness) * scale)
            stats = yield from reducer.step(state, grad, comm)
            found.append((grad.tolist(), state.residual.tolist(), stats.counts, stats.global_count, stats.skipped))
        return found

    there = fake_device() if on_device else nullcontext()
    with patch.object(table, "TRIED", ()), recorded_streams(), torch.no_grad(), there:
        return group.carry_out([steps(comm) for comm in group.comms])


@pytest.mark.parametrize(("method", "setting", "scales"), ROWS)
def test_a_step_on_a_device_gives_the_bits_of_the_cpu(
    method: str, setting: str | None, scales: list[float], group: SimulatedRanks
) -> None:
    settings = [f"sparsifier={method}", *([] if setting is None else [setting])]
    on_device, on_cpu = (outcomes(settings, group, scales, on_device=where) for where in (True, False))
    assert on_device == on_cpu
    if setting == SKIP:
        assert [outcome[-1] for outcome in on_cpu[0]] == [math.isnan(scale) for scale in scales]
