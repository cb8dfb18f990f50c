"""Steps on an accelerator give the bits of steps on a CPU: a fake device, on which plain torch does all the work."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import micro
from micro import kernels
from micro.codecs.base import Codec
from micro.comm.lockstep import SimulatedRanks
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from tests.fake_device import DEVICE, DeviceTensor, fake_device
from tests.parts import CPU
from tests.recorded_streams import recorded_streams
from tests.sparsifiers import TABLE

LAYOUT = micro.Layout(("matrix", "vector", "last"), ((40, 50), (1500,), (500,)))
CHANGING = [1.0, 1.0, 1.0, 1.0, 100.0, 1.0, 1e-3, 1.0]  # guesses from the last step are far off
ZERO_AND_NAN = [1.0, 1.0, 1.0, 0.0, 1.0, math.nan, 1.0, 1.0]
NAN = [1.0, math.nan, 1.0, 1.0]  # the mean is undone
SKIP: dict[str, Any] = {"nonfinite": "skip"}
MOMENTUM: dict[str, Any] = {"feedback": micro.MomentumCorrection()}
METHODS: list[tuple[str, dict[str, Any], list[float]]] = [  # rows, settings, factors of the gradient step by step
    ("micro+agreed per_tensor+topk+gather", {}, CHANGING),
    ("scaled_elements+micro+agreed exdyna+repaired threshold gtopk gtopk+published dsa dsa+published", {}, CHANGING),
    ("gaussiank+repaired sidco+e+repaired dgc+repaired oktopk", {}, CHANGING),
    ("gtopk+published dsa+published oktopk", MOMENTUM, CHANGING),
    ("gaussiank+repaired threshold dsa oktopk", SKIP, ZERO_AND_NAN),
    ("dsa", {"density": 0.5}, [1.0] * 4),  # sums are dense
    ("sparseloco dct fft fft+residual powersgd", SKIP, NAN),
]
ROWS = [(name, settings, scales) for names, settings, scales in METHODS for name in names.split()]
REDUCERS: dict[str, Any] = {row.name: row.make(0.05, 0) for row in TABLE}
KEY = (1, 2, 3)
Outcome = tuple[list[float], list[float], tuple[int, ...], int, bool]
"""Update, residual, counts, number of updated elements of a step, and whether it was skipped."""


def outcomes(reducer: micro.Reducer, scales: list[float], *, on_device: bool) -> list[list[Outcome]]:
    """Return what each of two ranks, which do all of their work themselves, has after each step."""
    device = DEVICE if on_device else CPU
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
    with patch.object(kernels, "TRIED", ()), recorded_streams(), torch.no_grad(), there:
        return ranks.carry_out([steps(comm) for comm in ranks.comms])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "scales"), ROWS)
def test_a_step_on_a_device_gives_the_bits_of_the_cpu(name: str, settings: dict[str, Any], scales: list[float]) -> None:
    reducer = replace(REDUCERS[name], **settings)
    on_device, on_cpu = (outcomes(reducer, scales, on_device=where) for where in (True, False))
    assert on_device == on_cpu
    if settings is SKIP:
        assert [outcome[-1] for outcome in on_cpu[0]] == [math.isnan(scale) for scale in scales]


@pytest.mark.parametrize("name", sorted(micro.known(Codec)))
def test_messages_of_a_device_equal_those_of_the_cpu(name: str) -> None:
    """Blocks of no power of two, by whose length a device divides in another way."""
    kind = micro.known(Codec)[name]
    settings = {"block": 100, "rule": "published"}
    codec = micro.build(Codec, {"name": name} | {key: settings[key] for key in settings if hasattr(kind, key)})
    values = torch.randn(1537, generator=torch.Generator().manual_seed(0))
    expected = codec.encode(values.clone(), KEY).tolist()
    with patch.object(kernels, "TRIED", ()), recorded_streams(), fake_device():
        assert codec.encode(DeviceTensor(values.clone()), KEY).tolist() == expected
