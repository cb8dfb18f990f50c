"""Eight simulated ranks on a GPU: each method compared with the CPU."""

import pytest
import torch

import micro
from micro.testing import LAYOUT, Case
from tests.gpu.places import place
from tests.sparsifiers import TABLE

WORLD_SIZE, STEPS = 8, 5
DEVICES = [place(1, "gloo", where) for where in ("cpu", "cuda")]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_on_a_device_are_those_on_the_cpu(where: object, dtype: torch.dtype) -> None:
    device = where.device  # type: ignore[attr-defined]
    wrong = {}
    for row in TABLE[:: 8 if device == "cpu" else 1]:
        case = Case(
            reducer=row.make(0.05, 0), promises=row.promises, world_size=row.world_size(WORLD_SIZE), dtype=dtype
        )
        both = [
            micro.Simulation(case.reducer, LAYOUT, case.world_size, dtype=dtype, device=each)
            for each in ("cpu", device)
        ]
        for step in range(STEPS):
            grads = case.gradients(step)
            expected, found = (each.step(grads.to(each.device)).update.cpu() for each in both)
            places = int(((expected != 0) != (found != 0)).sum())
            difference = float((expected - found).abs().max() / expected.abs().max())
            if places or difference > 64 * torch.finfo(dtype).eps:
                wrong[row.name] = f"step {step}: {places} other places, {difference:.0e} of the largest"
                break
    assert not wrong
