"""Sums that thresholds are fitted to: compiled, as the gradient is added, and in plain torch they are right."""

import math

import pytest
import torch
from torch import Tensor

from micro import kernels
from micro.kernels import sums as sums_module
from micro.kernels import threads
from micro.kernels.sums import Sums, absorb_and_sum_, sums_above, sums_of
from micro.kernels.tiles import TILE
from micro.randomness import generator
from tests.products import grid

FIELDS = ("count", "total", "squares", "magnitudes", "largest", "smallest")


def exact(x: Tensor, floor: float) -> list[float]:
    kept = x[x.abs() > floor].double()
    sizes = kept.abs()
    extremes = [float(sizes.max()), float(sizes.min())] if kept.numel() else [0.0, math.inf]
    return [kept.numel(), float(kept.sum()), float(kept.square().sum()), float(sizes.sum()), *extremes]


def check(sums: Sums, expected: list[float], *, fields: int = len(FIELDS)) -> None:
    size = expected[FIELDS.index("magnitudes")]
    for name, value in [*zip(FIELDS, expected, strict=True)][:fields]:
        slack = 3e-6 * (size if name == "total" else abs(value)) if math.isfinite(value) else 0.0
        assert getattr(sums, name) == value or abs(getattr(sums, name) - value) <= slack, name


@grid(
    numel=[0, 1, 31, 33, TILE + 5],
    scale=[1e-30, 1.0, 1e25],
    floor=[0.0, 1.2, 10.0],
    dtype=[torch.float32, torch.float64],
)
def test_sums_are_those_of_what_is_larger(numel: int, scale: float, floor: float, dtype: torch.dtype) -> None:
    x = torch.randn(numel, generator=generator(numel)).to(dtype).mul_(scale)
    floor = float(torch.tensor(floor * scale, dtype=dtype))
    check(sums_above(x, floor), exact(x, floor))
    check(sums_of(x), exact(x, -1.0), fields=5)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_pass_that_adds_the_gradient_gives_the_sums(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "LEAST", TILE)
    torch.set_num_threads(num_threads)
    try:
        residual, grad = (torch.randn(9 * TILE + 7, generator=generator(seed)) for seed in (0, 1))
        grad[3 * TILE + 1], grad[7 * TILE] = math.nan, math.inf
        expected, source = residual.clone(), grad.clone()
        bad = kernels.absorb_(expected, source)
        found, sums = absorb_and_sum_(residual, grad)
        assert found == bad == 3 * TILE + 1
        assert torch.equal(residual, expected)
        assert not grad.any()
        assert sums == sums_of(expected)
        check(sums, exact(expected, -1.0), fields=5)
    finally:
        torch.set_num_threads(before)


def test_moments_of_sums() -> None:
    x = torch.randn(1000, generator=generator(5), dtype=torch.float64) + 0.5
    sums = sums_of(x)
    assert sums.mean == pytest.approx(float(x.mean()))
    assert sums.variance == pytest.approx(float(x.var()))
    assert sums.mean_magnitude == pytest.approx(float(x.abs().mean()))
    assert sums.variance_of_magnitudes == pytest.approx(float(x.abs().var()))


def test_plain_torch_adds_up_more_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "CHUNK", 100)
    x = torch.randn(250, generator=generator(6), dtype=torch.float64)
    check(sums_above(x, 1.0), exact(x, 1.0))
