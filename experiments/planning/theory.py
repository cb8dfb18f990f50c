"""The theoretical bound on the error of top-k, and a check of its assumption.

Notation: u is a vector (numel,), here gradient + residual; a share is k / numel in [0, 1]; an error is ``norm(u -
kept)^2 / norm(u)^2``. The bound of Shi et al. holds if the curve of squared, sorted, normalised magnitudes is convex
and below the line from (0, 1) to (1, 0). Bell-shaped vectors have such curves; vectors of equal magnitudes do not, and
break the bound.

Source: Shi, Chu, Cheung and See, Understanding top-k sparsification in distributed deep learning, arXiv 1911.08772.
"""

import torch
from torch import Tensor

ROUNDING = 1e-12  # relative slack of the checks, for sums in double precision


def pi_squared(u: Tensor, points: int = 1000) -> tuple[Tensor, Tensor]:
    """Return the curve of squared magnitudes relative to the largest, in descending order.

    Args:
        u: (numel,) not all zero.
        points: maximal number of points of the curve, evenly spaced, including both ends.
    Returns:
        shares (m,): index / numel, from 0, and pi^2 (m,), falling from 1, both float64 on the CPU.

    Raises:
        ValueError: ``u`` is all zeros, or fewer than 2 points.
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    squares = _descending_squares(u)
    places = torch.linspace(0, u.numel() - 1, min(points, u.numel()), dtype=torch.float64).round().long()
    return places.double() / u.numel(), (squares[places] / squares[0]).cpu()


def is_below_line(u: Tensor, points: int = 1000) -> bool:
    """Return whether the curve of ``u`` (numel,) is at most the line from (0, 1) to (1, 0) at these points."""
    shares, curve = pi_squared(u, points)
    return bool((curve <= 1 - shares + ROUNDING).all())


def is_convex(u: Tensor, points: int = 20) -> bool:
    """Return whether the curve of ``u`` (numel,) is convex at these points; with all points no sample's is."""
    shares, curve = pi_squared(u, points)
    slopes = curve.diff() / shares.diff()
    return bool((slopes.diff() >= -ROUNDING).all())


def top_k_error(u: Tensor, shares: Tensor) -> Tensor:
    """Return the exact error (m,) float64 of keeping the round(share * numel) largest magnitudes of ``u`` (numel,).

    Raises:
        ValueError: ``u`` is all zeros, or a share is outside [0, 1].
    """
    kept = _counts(u, shares)
    dropped = _descending_squares(u).flip(0).cumsum(0).cpu()  # sums of the 1, 2, ... numel smallest
    errors = dropped[(u.numel() - kept - 1).clamp(min=0)] / dropped[-1]
    return torch.where(kept == u.numel(), 0.0, errors)


def top_k_bound(shares: Tensor) -> Tensor:
    """Return the paper's bound on the error of top-k: (1 - share)^2."""
    return (1 - shares) ** 2


def random_k_error(shares: Tensor) -> Tensor:
    """Return the expected error of keeping a random k, for any vector: 1 - share."""
    return 1 - shares


def bound_holds(u: Tensor, shares: Tensor) -> Tensor:
    """Return (m,) bool: whether top-k's exact error of ``u`` (numel,) is within the bound, for each share."""
    exact_shares = _counts(u, shares).double() / u.numel()
    return top_k_error(u, shares) <= top_k_bound(exact_shares) + ROUNDING


def _counts(u: Tensor, shares: Tensor) -> Tensor:
    if not bool(((shares >= 0) & (shares <= 1)).all()):
        raise ValueError(f"shares must be in [0, 1], got {shares.tolist()}")
    return (shares.double().cpu() * u.numel()).round().long()


def _descending_squares(u: Tensor) -> Tensor:
    magnitudes = u.detach().double().abs().sort(descending=True).values
    if not magnitudes.numel() or not magnitudes[0] > 0:
        raise ValueError("u must hold something other than zeros")
    return (magnitudes / magnitudes[0]) ** 2
