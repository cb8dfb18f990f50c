"""Whole steps of methods with Triton's kernels, which its interpreter runs on the CPU, equal those in plain torch."""

from contextlib import closing
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.interpreted import serving_the_cpu  # isort: skip  # before what imports triton

import micro
from micro.codecs.half import BFloat16, Half
from micro.codecs.int8 import Int8
from micro.codecs.sign import Sign
from micro.kernels import reference, table

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy, of the interpreter

LAYOUT = micro.Layout(("matrix", "vector"), ((40, 30), (133,)))
RANKS, STEPS, DENSITY = 2, 3, 0.05
GATHER = micro.Gather()
METHODS: dict[str, micro.Reducer] = {
    "micro": micro.SparseReducer(micro.Micro(), DENSITY),
    "topk": micro.SparseReducer(micro.TopK(), DENSITY, exchange=GATHER),
    "gaussiank": micro.SparseReducer(micro.Estimated(fit="gaussiank"), DENSITY, exchange=GATHER),
    "sidco": micro.SparseReducer(micro.Estimated(fit={"name": "sidco", "stages": 2}), DENSITY, exchange=GATHER),
    "dgc": micro.SparseReducer(
        micro.Estimated(fit="dgc"), DENSITY, exchange=GATHER, feedback=micro.MomentumCorrection()
    ),
    **{
        codec.name: micro.SparseReducer(micro.Everything(), 1.0, exchange=exchange, codec=codec)
        for codec, exchange in (
            (Half(), GATHER),
            (BFloat16(), micro.Union()),
            (Int8(), micro.Union()),
            (Sign(block=64), micro.Union()),
        )
    },
}


def run(reducer: micro.Reducer) -> list[Tensor]:
    """Return the updates of all ranks and their residuals, step by step; in the last one a gradient has a NaN."""
    out = []
    with closing(micro.Simulation(reducer, LAYOUT, RANKS, dtype=torch.float32)) as simulation:
        for step in range(STEPS):
            grads = torch.randn(RANKS, LAYOUT.numel, generator=torch.Generator().manual_seed(step))
            if step == STEPS - 1:
                grads[1, 1000] = torch.nan
            simulation.step_(grads)
            out += [grads, *simulation.residuals()]
    return [tensor.clone() for tensor in out]


@pytest.mark.parametrize("name", METHODS)
def test_a_step_with_the_kernels_gives_the_bits_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reducer = replace(METHODS[name], nonfinite="skip")  # type: ignore[type-var]
    monkeypatch.setattr(reference, "SAMPLE", 200)  # fewer than half of the elements, as of a long vector
    with serving_the_cpu() as launched:
        found = run(reducer)
    assert launched
    with patch.object(table, "TRIED", ()):
        expected = run(reducer)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
