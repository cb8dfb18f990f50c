"""Tiles and their transform, against brute force."""

import math

import pytest
import torch

import micro
from micro.zoo.dct import DCTReducer
from micro.zoo.tiles import dct, tile_pieces, tiling_of
from tests.parts import normal, simulated

LAYOUT = micro.Layout(("matrix", "bias", "conv", "none"), ((7, 10), (9,), (5, 2, 3, 3), (0,)))
SQUARE = micro.Layout(("a",), ((8, 8),))


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_the_transform_is_the_orthonormal_cosine_transform(length: int) -> None:
    x = normal(length)
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
    x, tiling = normal(LAYOUT.numel), tiling_of(LAYOUT, 4, has_transform=has_transform)
    tiled = tiling.forward(x)
    torch.testing.assert_close(tiling.inverse(tiled), x)
    torch.testing.assert_close(tiled.norm(), x.norm())
    spans = tile_pieces(LAYOUT, 4, x.device).spans.tolist()
    assert [start for start, _ in spans] == [0, *[stop for _, stop in spans[:-1]]]
    assert spans[-1][1] == LAYOUT.numel
    assert max(stop - start for start, stop in spans) == 16


def test_a_tile_is_a_square_of_its_matrix() -> None:
    layout, matrix = micro.Layout(("a",), ((6, 7),)), torch.arange(42.0).view(6, 7)
    plain, turned = (tiling_of(layout, 4, has_transform=has).forward(matrix.view(-1)) for has in (False, True))
    tiles = [matrix[:4, :4], matrix[:4, 4:], matrix[4:, :4], matrix[4:, 4:]]
    assert torch.equal(plain, torch.cat([tile.reshape(-1) for tile in tiles]))
    torch.testing.assert_close(turned[:16].view(4, 4), dct(4, matrix) @ tiles[0] @ dct(4, matrix).T)


def test_a_smooth_gradient_needs_one_coefficient_of_each_tile() -> None:
    grads = torch.full((2, 64), 3.0, dtype=torch.float64)
    for transform, error in (("dct", 0.0), ("none", math.sqrt(15 / 16))):
        step = simulated(DCTReducer(density=1 / 16, size=4, transform=transform), SQUARE, 2).step(grads)
        assert step.stats[0].relative_error == pytest.approx(error, abs=1e-12)
        assert torch.allclose(step.update, grads[0]) == (transform == "dct")
