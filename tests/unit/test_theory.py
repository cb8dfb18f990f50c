"""The curve, the bound and their checks, against loops over elements and vectors whose answer is known."""

import pytest
import torch
from torch import Tensor

from micro.planning.theory import (
    bound_holds,
    is_below_line,
    is_convex,
    pi_squared,
    random_k_error,
    top_k_bound,
    top_k_delta,
    top_k_error,
    triangle_line,
)

SHARES = torch.tensor([0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0], dtype=torch.float64)


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_curve_is_what_a_sort_says() -> None:
    shares, curve = pi_squared(torch.tensor([1.0, -4.0, 0.0, 2.0]), points=10)
    assert shares.tolist() == [0, 0.25, 0.5, 0.75]
    assert curve.tolist() == [1, 0.25, 0.0625, 0]


def test_few_points_of_a_long_curve_begin_and_end_with_it() -> None:
    u = normal(1001)
    shares, curve = pi_squared(u, points=11)
    ranked = sorted((float(x) ** 2 for x in u), reverse=True)
    assert shares.tolist() == [i * 100 / 1001 for i in range(11)]
    assert curve.tolist() == pytest.approx([ranked[100 * i] / ranked[0] for i in range(11)])


@pytest.mark.parametrize("numel", [1, 7, 200])
def test_error_is_what_a_loop_says(numel: int) -> None:
    u = normal(numel)
    ranked = sorted((float(x) ** 2 for x in u), reverse=True)
    expected = [sum(ranked[round(float(share) * numel) :]) / sum(ranked) for share in SHARES]
    assert top_k_error(u, SHARES).tolist() == pytest.approx(expected, abs=1e-14)


def test_error_of_nothing_is_all_and_of_all_is_nothing() -> None:
    assert top_k_error(normal(50), torch.tensor([0.0, 1.0])).tolist() == [1, 0]


def test_random_k_error_is_the_mean_over_draws() -> None:
    u, k = normal(40), 10
    randomness = torch.Generator().manual_seed(0)
    orders = torch.rand(20_000, 40, generator=randomness).argsort(1)
    errors = (u**2)[orders[:, k:]].sum(1) / (u**2).sum()
    assert float(errors.mean()) == pytest.approx(float(random_k_error(torch.tensor(k / 40))), abs=0.005)


def test_delta_is_one_minus_the_bound() -> None:
    numel, k = 1000, 30
    share = torch.tensor(k / numel, dtype=torch.float64)
    assert float(top_k_delta(share)) == pytest.approx((2 * k * numel - k * k) / numel**2)
    assert torch.allclose(top_k_delta(SHARES), 1 - top_k_bound(SHARES))


@pytest.mark.parametrize(
    "draw", [normal, lambda numel: normal(numel) * normal(numel, 1).abs()], ids=["normal", "peaked"]
)
def test_bell_shaped_vectors_keep_assumption_and_bound(draw: object) -> None:
    u = draw(20_000)  # type: ignore[operator]
    assert is_below_line(u)
    assert is_convex(u)
    assert bound_holds(u, SHARES).all()


def test_equal_magnitudes_break_assumption_and_bound() -> None:
    u = torch.ones(1000) * torch.sign(normal(1000))
    inside = SHARES[2:-1]
    assert not is_below_line(u)
    assert torch.allclose(top_k_error(u, inside), random_k_error(inside))
    assert not bound_holds(u, inside).any()
    assert bound_holds(u, torch.tensor([0.0, 1.0])).all()


def test_uniform_squares_lie_on_the_line_and_are_just_within_the_bound() -> None:
    numel = 1000
    u = (torch.arange(numel, dtype=torch.float64) / numel).sqrt()
    shares, curve = pi_squared(u, points=numel)
    assert torch.allclose(curve, triangle_line(shares), atol=2 / numel)
    assert torch.allclose(top_k_error(u, SHARES), top_k_bound(SHARES), atol=1 / numel)
    assert bound_holds(u, SHARES).all()


def test_curve_above_the_line_in_the_middle_is_found_out() -> None:
    u = torch.tensor([1.0] * 60 + [0.01] * 40)
    assert not is_below_line(u)
    assert not is_convex(u)
    assert not bound_holds(u, torch.tensor([0.3])).any()


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="u must hold something other than zeros"):
        top_k_error(torch.zeros(3), SHARES)
    with pytest.raises(ValueError, match="points must be at least 2, got 1"):
        pi_squared(torch.ones(3), points=1)
    with pytest.raises(ValueError, match=r"shares must be in \[0, 1\], got \[1.5\]"):
        top_k_error(torch.ones(3), torch.tensor([1.5]))
