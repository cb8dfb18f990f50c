"""Sums that thresholds are fitted to: compiled, as the gradient is added, and in plain torch they are right."""

import math

import pytest
import torch
from torch import Tensor

from micro import kernels
from micro.kernels import sums as sums_module
from micro.kernels import threads
from micro.kernels.sums import Sums, absorb_and_square_, absorb_and_sum_, squares_by_piece, sums_above, sums_of
from micro.kernels.tiles import STRIP, TILE
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


LENGTHS = (1, 0, 31, STRIP + 33, 3 * TILE, 0, 5, 2 * STRIP)


@grid(lengths=[(0,), (7,), LENGTHS], scale=[1e-30, 1.0, 1e25], dtype=[torch.float32, torch.float64, torch.bfloat16])
def test_squares_are_those_of_each_piece(lengths: tuple[int, ...], scale: float, dtype: torch.dtype) -> None:
    x = torch.randn(sum(lengths), generator=generator(2)).mul_(scale).to(dtype)
    found = squares_by_piece(x.to(torch.promote_types(dtype, torch.float32)), lengths)
    expected = [float(piece.double().square().sum()) for piece in x.split(list(lengths))]
    assert found.dtype == torch.float64
    if kernels.compiled(x):  # whatever single precision holds
        assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=0.0)
    elif scale == 1.0 or dtype == torch.float64:
        assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_squares_of_a_piece_that_is_not_finite_are_not(value: float) -> None:
    x = torch.ones(100)
    x[40] = value
    first, second, third = squares_by_piece(x, (30, 40, 30)).tolist()
    assert (first, third) == (30.0, 30.0)
    assert not math.isfinite(second)


@grid(num_threads=[1, 3], dtype=[torch.float32, torch.bfloat16], has_rest=[False, True])
def test_the_pass_that_adds_the_gradient_gives_the_squares(
    num_threads: int, dtype: torch.dtype, has_rest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, lengths = torch.get_num_threads(), [*LENGTHS, 5 * TILE, *([9] if has_rest else [])]
    monkeypatch.setattr(threads, "LEAST", TILE)
    torch.set_num_threads(num_threads)
    try:
        residual, grad = (torch.randn(sum(lengths), generator=generator(seed)) for seed in (0, 1))
        grad = grad.to(dtype)
        grad[2 * TILE + 1], grad[5 * TILE] = math.nan, math.inf
        expected, source = residual.clone(), grad.clone()
        bad = kernels.absorb_(expected, source)
        found, squares = absorb_and_square_(residual, grad, lengths)
        assert found == bad == 2 * TILE + 1
        assert torch.equal(residual, expected)
        assert not grad.any()
        assert torch.equal(squares, squares_by_piece(expected, lengths))
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
