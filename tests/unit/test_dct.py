"""Tiles and their transform, against brute force."""

import math

import pytest
import torch
from torch import Tensor

import micro
from micro.zoo.dct import DCTReducer
from micro.zoo.tiles import dct, tiling_of

LAYOUT = micro.Layout(("matrix", "bias", "conv", "none"), ((7, 10), (9,), (5, 2, 3, 3), (0,)))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_the_transform_is_the_orthonormal_cosine_transform(length: int) -> None:
    x = drawn(length)
    expected = [
        math.sqrt((1 if k == 0 else 2) / length)
        * sum(float(x[i]) * math.cos(math.pi * (2 * i + 1) * k / (2 * length)) for i in range(length))
        for k in range(length)
    ]
    matrix = dct(length, x)
    assert (matrix @ x).tolist() == pytest.approx(expected)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(length, dtype=torch.float64))


@pytest.mark.parametrize("has_transform", [True, False])
def test_tiles_and_back_are_the_vector_whatever_the_sides(*, has_transform: bool) -> None:
    x, tiling = drawn(LAYOUT.numel), tiling_of(LAYOUT, 4, has_transform=has_transform)
    tiled = tiling.forward(x)
    torch.testing.assert_close(tiling.inverse(tiled), x)
    torch.testing.assert_close(tiled.norm(), x.norm())
    spans = tiling.pieces(x.device).spans.tolist()
    assert [start for start, _ in spans] == [0, *[stop for _, stop in spans[:-1]]]
    assert spans[-1][1] == LAYOUT.numel
    assert max(stop - start for start, stop in spans) == 16


def test_a_tile_is_a_square_of_its_matrix() -> None:
    layout = micro.Layout(("a",), ((6, 7),))
    matrix = torch.arange(42.0)
    tiled = tiling_of(layout, 4, has_transform=False).forward(matrix)
    assert tiled[:16].tolist() == matrix.view(6, 7)[:4, :4].reshape(-1).tolist()
    assert tiled[16:28].tolist() == matrix.view(6, 7)[:4, 4:].reshape(-1).tolist()
    assert tiled[28:36].tolist() == matrix.view(6, 7)[4:, :4].reshape(-1).tolist()
    plain, turned = tiling_of(layout, 4, has_transform=False), tiling_of(layout, 4, has_transform=True)
    tile = plain.forward(matrix)[:16].view(4, 4)
    torch.testing.assert_close(turned.forward(matrix)[:16].view(4, 4), dct(4, tile) @ tile @ dct(4, tile).T)


def test_a_smooth_gradient_needs_one_coefficient_of_each_tile() -> None:
    layout = micro.Layout(("a",), ((8, 8),))
    grads = torch.full((2, 64), 3.0, dtype=torch.float64)
    for transform, error in (("dct", 0.0), ("none", math.sqrt(15 / 16))):
        reducer = DCTReducer(density=1 / 16, size=4, transform=transform)
        simulation = micro.Simulation(reducer, layout, 2, dtype=torch.float64)
        step = simulation.step(grads)
        assert step.stats[0].relative_error == pytest.approx(error, abs=1e-12)
        assert torch.allclose(step.update, grads[0]) == (transform == "dct")


def test_the_error_of_large_numbers_is_a_number() -> None:
    layout = micro.Layout(("a",), ((8, 8),))
    grads = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    simulation = micro.Simulation(DCTReducer(density=1 / 8, size=4), layout, 2)
    ordinary = simulation.step(grads).stats[0].relative_error
    simulation = micro.Simulation(DCTReducer(density=1 / 8, size=4), layout, 2)
    large = simulation.step(grads * 2.0**90).stats[0].relative_error  # squares are beyond single precision
    assert large == pytest.approx(ordinary)
