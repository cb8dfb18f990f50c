"""A table of what operations of `micro.kernels` are tried with, by kind of values, length and dtype."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from micro import kernels
from micro.kernels import reference
from micro.values.finite import index_of
from micro.values.randomness import generator

Arguments = tuple[Any, ...]
ONE_HALF = 0x3F000000  # as bits of a float32
LENGTHS = [0, 1, 15, 17, 64, 1024, 2077, 40_003]
KINDS = ["normal", "special", "tied", "small"]


def vector(kind: str, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return (numel,) values: normal; with NaN, infinity and zeros; with many ties; or without a leading digit."""
    x = torch.randn(numel, generator=generator(seed, numel))
    if kind == "special":
        x[::7], x[3::29], x[5::31], x[6::37] = 0.0, math.nan, -math.inf, -0.0
    if kind == "tied":
        x = x.mul(4).round()
    return (x * 1e-40 if kind == "small" else x).to(dtype)


def gradient(kind: str, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a residual and a gradient whose sum is too large at one place, where the kind is special."""
    wide = torch.promote_types(dtype, torch.float32)
    residual, grad = vector("normal", numel, wide, seed=1), vector(kind, numel, dtype)
    if kind == "special" and numel:
        residual[numel // 3] = 0.75 * reference.limit(wide)
        grad[numel // 3] = min(0.75 * reference.limit(wide), torch.finfo(dtype).max)
    return residual, grad


def entries(numel: int, count: int, seed: int = 0) -> Tensor:
    """Return ascending int32 indices (at most count,) of a vector."""
    return torch.randperm(max(numel, 1), generator=generator(seed, numel))[: min(count, numel)].sort().values.int()


def lists(kind: str, numel: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return three lists of entries, one after the other; one may be empty."""
    parts = [entries(numel, numel // 3, 1), entries(numel, 0), entries(numel, numel // 2, 2)]
    indices = torch.cat(parts)
    return indices, vector(kind, indices.numel()), [part.numel() for part in parts]


def candidates(numel: int, share: int) -> Arguments:
    """Return indices, magnitudes, and what is kept of them: all from 4 on, and ``share`` of those from 2 on."""
    bottom, top = 0x40000000, 0x40800000  # as bits of a float32
    indices, magnitudes, _ = reference.collect(vector("tied", numel), 0, ONE_HALF, 20)
    return indices, magnitudes, int((magnitudes >= 4).sum()) + share, bottom, top, share


def pieces(numel: int) -> Tensor:
    edges = torch.tensor([0, numel // 7, numel // 7, numel // 2, numel])
    return torch.stack([edges[:-1], edges[1:]], 1)


CASES: dict[str, Callable[[str, int, torch.dtype], list[Arguments]]] = {
    "absorb_": lambda kind, numel, dtype: [gradient(kind, numel, dtype)],
    "absorb_and_sum_": lambda kind, numel, dtype: [gradient(kind, numel, dtype)],
    "above": lambda kind, numel, dtype: [(vector(kind, numel, dtype), cut) for cut in (-1.0, 0.0, 1.5, 1e39, math.nan)],
    "above_by_piece": lambda kind, numel, dtype: [
        (vector(kind, numel), pieces(numel), torch.tensor([0.5, 0.0, 2.0, math.inf]))
    ],
    "kth_by_run": lambda kind, numel, dtype: [
        (vector("tied", numel).abs(), pieces(numel).diff().view(-1), torch.tensor([0, 1, 3, 99_999]))
    ],
    "magnitude_counts": lambda kind, numel, dtype: [
        (vector(kind, numel, dtype), *bins)
        for bins in ((0, 20, 2040), (ONE_HALF, 18, 32), (0x3F812345, 0, 7), (1, 26, 4))
    ],
    "largest": lambda kind, numel, dtype: [
        (vector(kind, numel, dtype).nan_to_num(), k) for k in {1, numel // 100, numel // 3, numel - 1} if 0 < k < numel
    ],
    "first_distinct": lambda kind, numel, dtype: [
        (torch.randint(max(numel, 1), (numel // 2,), generator=generator(numel)).to(kept), max(numel, 1), k)
        for kept in (torch.int32, torch.int64)
        for k in (0, 1, numel // 5, numel)
    ],
    "gather": lambda kind, numel, dtype: [(vector(kind, numel), entries(numel, numel // 2))],
    "add_at_": lambda kind, numel, dtype: [
        (vector("normal", numel), places, vector("normal", places.numel(), seed=3), alpha)
        for places in (entries(numel, numel // 2), entries(numel, numel).flip(0) // 3)
        for alpha in (1.0, -1.0, 0.3)
    ],
    "added": lambda kind, numel, dtype: [lists("normal", numel), lists("tied", numel)],
    "common": lambda kind, numel, dtype: [
        (entries(numel, numel // 2, 1), vector("normal", numel // 2), entries(numel, numel // 3, 2))
    ],
    "sums": lambda kind, numel, dtype: [(vector("tied", numel, dtype), floor) for floor in (-1.0, 0.0, 1.25, 1e30)],
    "collect": lambda kind, numel, dtype: [
        (vector(kind, numel).nan_to_num(), 1000, ONE_HALF, shift) for shift in (10, 20)
    ],
    "keep": lambda kind, numel, dtype: [candidates(numel, share) for share in (0, 1, 2)] if numel > 63 else [],
}
ROUNDED = {"absorb_and_sum_", "sums"}


def outcome(function: Callable[..., Any], given: Arguments) -> list[Any]:
    """Return what a function returns, its parts one after the other, then its vectors as it leaves them."""
    vectors = [x.clone() if isinstance(x, Tensor) else x for x in given]
    result = function(*vectors)
    if function.__name__ == "absorb_":
        result = index_of(result, given[1].numel())
    if function.__name__ == "absorb_and_sum_":
        result = (index_of(result[0], given[1].numel()), *result[1][:-1])  # the smallest is not known, as below
    if function.__name__ == "sums" and given[1] < 0:
        result = result[:-1]
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [*parts, *(x for x in vectors if isinstance(x, Tensor))]


def assert_same(operation: str, form: Callable[..., Any], given: Arguments) -> None:
    """Check that a form of an operation gives what the reference gives, and leaves the same vectors."""
    expected = outcome(getattr(kernels.module(kernels.TABLE[operation].torch or ""), operation), given)
    is_rounded = operation in ROUNDED
    for one, other in zip(outcome(form, given), expected, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5 * is_rounded, atol=1e-8 * is_rounded, equal_nan=True)
        else:
            assert one == (pytest.approx(other, rel=1e-5, abs=1e-3) if is_rounded and other is not None else other)
