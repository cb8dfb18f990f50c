"""Steps on an accelerator give the bits of steps on a CPU: a fake device, on which plain torch does all the work."""

import math
from contextlib import nullcontext
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
from tests.parts import CPU
from tests.recorded_streams import recorded_streams

LAYOUT = Layout(("matrix", "vector", "last"), ((40, 50), (1500,), (500,)))
FIXED = ["density=0.05", "optimizer.momentum=0", "cluster.nproc_per_node=2"]
CHANGING = [1.0, 1.0, 1.0, 1.0, 100.0, 1.0, 1e-3, 1.0]  # guesses from the last step are far off
ZERO_AND_NAN = [1.0, 1.0, 1.0, 0.0, 1.0, math.nan, 1.0, 1.0]
NAN = [1.0, math.nan, 1.0, 1.0]  # the mean is undone
SKIP, MOMENTUM = "nonfinite=skip", "sparsifier.feedback={name: momentum}"
METHODS: list[tuple[str, str, list[float]]] = [  # methods, a setting, factors of the gradient step by step
    ("micro micro_repaired micro_slack micro_tensors micro_scaled_elements exdyna", "", CHANGING),
    ("gaussiank sidco redsync dgc sage threshold gtopk gtopk_published dsa dsa_published oktopk", "", CHANGING),
    ("gtopk gtopk_published dsa_published oktopk", MOMENTUM, CHANGING),
    ("gaussiank redsync sage threshold dsa oktopk", SKIP, ZERO_AND_NAN),
    ("dsa", "density=0.5", [1.0] * 4),  # sums are dense
    ("demo fft fft_feedback powersgd", SKIP, NAN),
]
ROWS = [(method, setting, scales) for methods, setting, scales in METHODS for method in methods.split()]
Outcome = tuple[list[float], list[float], tuple[int, ...], int, bool]
"""Update, residual, counts, number of updated elements of a step, and whether it was skipped."""


def outcomes(settings: list[str], scales: list[float], *, on_device: bool) -> list[list[Outcome]]:
    """Return what each of two ranks, which do all of their work themselves, has after each step."""
    reducer, device = build_reducer(compose_run([*FIXED, *settings])), DEVICE if on_device else CPU
    placed: Any = DeviceTensor if on_device else lambda values: values

    def steps(comm: Comm) -> Reduction[list[Outcome]]:
        found, randomness = [], torch.Generator().manual_seed(comm.rank)
        reducer.prepare(comm, device)
        state = reducer.start(LAYOUT, torch.float32, device)
        for scale in scales:
            comm.begin_step()
            grad = placed(torch.randn(LAYOUT.numel, generator=randomness) * scale)
            stats = yield from reducer.step(state, grad, comm)
            found.append((grad.tolist(), state.residual.tolist(), stats.counts, stats.global_count, stats.skipped))
        return found

    there, ranks = fake_device() if on_device else nullcontext(), SimulatedRanks(2, shares=False)
    with patch.object(table, "TRIED", ()), recorded_streams(), torch.no_grad(), there:
        return ranks.carry_out([steps(comm) for comm in ranks.comms])


@pytest.mark.parametrize(("method", "setting", "scales"), ROWS)
def test_a_step_on_a_device_gives_the_bits_of_the_cpu(method: str, setting: str, scales: list[float]) -> None:
    settings = [f"sparsifier={method}", *filter(None, [setting])]
    on_device, on_cpu = (outcomes(settings, scales, on_device=where) for where in (True, False))
    assert on_device == on_cpu
    if setting == SKIP:
        assert [outcome[-1] for outcome in on_cpu[0]] == [math.isnan(scale) for scale in scales]
