"""Whole steps of methods with Triton's kernels, which its interpreter runs on the CPU, equal those in plain torch."""

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
from tests.parts import normal, simulated

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy, of the interpreter

LAYOUT = micro.Layout(("matrix", "vector"), ((40, 30), (133,)))
GATHER, UNION = micro.Gather(), micro.Union()


def sparse(selector: micro.Selector, exchange: micro.Exchange = GATHER, **parts: object) -> micro.SparseReducer:
    return micro.SparseReducer(selector, **{"density": 0.05, "exchange": exchange, "nonfinite": "skip", **parts})


METHODS = {
    "micro": sparse(micro.Micro(), UNION),
    "topk": sparse(micro.TopK()),
    "gaussiank": sparse(micro.Estimated(fit="gaussiank")),
    "sidco": sparse(micro.Estimated(fit={"name": "sidco", "stages": 2})),
    "dgc": sparse(micro.Estimated(fit="dgc"), feedback=micro.MomentumCorrection()),
    "half": sparse(micro.Everything(), density=1.0, codec=Half()),
    "bfloat16": sparse(micro.Everything(), UNION, density=1.0, codec=BFloat16()),
    "int8": sparse(micro.Everything(), UNION, density=1.0, codec=Int8()),
    "sign": sparse(micro.Everything(), UNION, density=1.0, codec=Sign(block=64)),
}


def run(reducer: micro.Reducer) -> list[Tensor]:
    """Return updates and residuals, step by step; in the last one a gradient has a NaN."""
    out, simulation = [], simulated(reducer, LAYOUT, 2, dtype=torch.float32)
    for step in range(3):
        grads = normal(2, LAYOUT.numel, seed=step, dtype=torch.float32)
        if step == 2:
            grads[1, 1000] = torch.nan
        taken = simulation.step(grads, residuals=True)
        out += [taken.update, taken.residuals]
    return out


@pytest.mark.parametrize("name", METHODS)
def test_a_step_with_the_kernels_gives_the_bits_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SAMPLE", 200)  # fewer than half of the elements, as of a long vector
    with serving_the_cpu() as launched:
        found = run(METHODS[name])
    assert launched
    with patch.object(table, "TRIED", ()):
        expected = run(METHODS[name])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
