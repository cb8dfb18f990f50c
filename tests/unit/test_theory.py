"""The curve, the bound and their checks, against loops over elements and vectors whose answer is known."""

import pytest
import torch

from experiments.planning.theory import (
    bound_holds,
    is_below_line,
    is_convex,
    pi_squared,
    random_k_error,
    top_k_bound,
    top_k_error,
)
from tests.parts import normal

SHARES = torch.tensor([0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(("numel", "points"), [(4, 10), (7, 7), (1001, 11)])
def test_curve_and_error_are_what_a_sort_says(numel: int, points: int) -> None:
    u = normal(numel)
    ranked = sorted((float(x) ** 2 for x in u), reverse=True)
    places = range(numel) if points >= numel else range(0, numel, (numel - 1) // (points - 1))
    shares, curve = pi_squared(u, points=points)
    assert shares.tolist() == [place / numel for place in places]
    assert curve.tolist() == pytest.approx([ranked[place] / ranked[0] for place in places])
    expected = [sum(ranked[round(float(share) * numel) :]) / sum(ranked) for share in SHARES]
    assert top_k_error(u, SHARES).tolist() == pytest.approx(expected, abs=1e-14)


def test_random_k_error_is_the_mean_over_draws() -> None:
    u, k = normal(40), 10
    orders = torch.rand(20_000, 40, generator=torch.Generator().manual_seed(0)).argsort(1)
    errors = (u**2)[orders[:, k:]].sum(1) / (u**2).sum()
    assert float(errors.mean()) == pytest.approx(float(random_k_error(torch.tensor(k / 40))), abs=0.005)


def test_uniform_squares_lie_on_the_line_and_are_just_within_the_bound() -> None:
    numel = 1000
    u = (torch.arange(numel, dtype=torch.float64) / numel).sqrt()
    shares, curve = pi_squared(u, points=numel)
    assert torch.allclose(curve, 1 - shares, atol=2 / numel)
    assert torch.allclose(top_k_error(u, SHARES), top_k_bound(SHARES), atol=1 / numel)
    assert bound_holds(u, SHARES).all()


def test_bell_shaped_vectors_keep_assumption_and_bound_and_equal_magnitudes_break_both() -> None:
    for u, holds in ((normal(20_000), True), (torch.sign(normal(1000)), False)):
        assert is_below_line(u) == holds
        assert bound_holds(u, SHARES[2:-1]).all() == holds
    assert is_convex(normal(20_000))
