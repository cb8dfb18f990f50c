"""Whole steps of methods with Triton's kernels, which its interpreter runs on the CPU, equal those in plain torch."""

import importlib
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
from micro.codecs.qsgd import QSGD
from micro.codecs.sign import Sign
from micro.kernels import reference, table

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy, of the interpreter

LAYOUT = micro.Layout(("matrix", "vector"), ((40, 30), (133,)))
RANKS, STEPS, DENSITY = 2, 3, 0.05
Kernels = tuple[str, ...]  # those that a step must call
METHODS: dict[str, tuple[micro.Reducer, Kernels]] = {
    "micro": (
        micro.SparseReducer(micro.Micro(), DENSITY),
        ("absorbing.absorb_", "scanning.above", "scanning.magnitude_counts"),
    ),
    "topk": (
        micro.SparseReducer(micro.TopK(), DENSITY, exchange=micro.Gather()),
        ("absorbing.absorb_", "scanning.largest"),
    ),
    "threshold": (micro.SparseReducer(micro.Threshold(value=2.0), DENSITY), ("absorbing.absorb_", "scanning.above")),
    **{
        name: (micro.SparseReducer(selector, DENSITY, exchange=micro.Gather()), ("summing.absorb_and_sum_", *more))
        for name, selector, more in (
            ("gaussiank", micro.Estimated(fit="gaussiank"), ("scanning.above",)),
            ("sidco", micro.Estimated(fit={"name": "sidco", "stages": 2}), ("scanning.above", "summing.sums")),
        )
    },
    "redsync": (
        micro.SparseReducer(micro.Estimated(fit="redsync"), DENSITY, exchange=micro.Gather()),
        ("absorbing.absorb_", "scanning.above"),
    ),
    "dgc": (
        micro.SparseReducer(
            micro.Estimated(fit="dgc"), DENSITY, exchange=micro.Gather(), feedback=micro.MomentumCorrection()
        ),
        ("scanning.above",),
    ),
    **{
        f"{codec.name}, {type(exchange).__name__}": (
            micro.SparseReducer(micro.Everything(), 1.0, exchange=exchange, codec=codec),
            ("codes.encode", "codes.decode"),
        )
        for codec, exchange in (
            (Half(), micro.Gather()),
            (BFloat16(), micro.Union()),
            (Int8(), micro.Union()),
            (Sign(block=64), micro.Union()),
        )
    },
    "codec without kernels": (
        micro.SparseReducer(micro.TopK(), DENSITY, exchange=micro.Gather(), codec=QSGD()),
        ("absorbing.absorb_", "scanning.largest"),
    ),
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


def counted(name: str, calls: list[str], patches: pytest.MonkeyPatch) -> None:
    """Have the kernel of that name note that it is called."""
    *place, last = name.split(".")
    module = importlib.import_module(".".join(["micro.kernels.triton", *place]))
    original = getattr(module, last)

    def call(*arguments: object, **more: object) -> object:
        calls.append(name)
        return original(*arguments, **more)

    patches.setattr(module, last, call)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_with_the_kernels_gives_the_bits_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reducer, wanted = METHODS[name]
    reducer = replace(reducer, nonfinite="skip")  # type: ignore[type-var]
    monkeypatch.setattr(reference, "SAMPLE", 200)  # fewer than half of the elements, as of a long vector
    calls: list[str] = []
    for each in wanted:
        counted(each, calls, monkeypatch)
    with serving_the_cpu():
        found = run(reducer)
    assert set(calls) == set(wanted)
    with patch.object(table, "TRIED", ()):
        expected = run(reducer)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
