"""Grids of cases: how many combinations of values a parametrized test runs with is decided here alone.

The environment variable MICRO_TESTS names the tier:

    fast    every value of every axis is in at least one case (make test FAST=1)
    pairs   every two values of two axes are together in at least one case (make test; the default)
    all     every combination is a case (MICRO_TESTS=all)
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

Case = tuple[int, ...]  # the index of a value on each axis


def every_value(sizes: Sequence[int]) -> list[Case]:
    """Return as many cases as the longest axis has values: every index of every axis is in one of them."""
    return [tuple(number % size for size in sizes) for number in range(max(sizes))]


def every_pair(sizes: Sequence[int]) -> list[Case]:
    """Return few cases in which every two indices of two axes are together at least once.

    A greedy covering array: each case starts with a pair that is still missing, and takes on every other axis the
    index that adds most of the missing pairs. With two axes these are all combinations.
    """
    if len(sizes) == 1:
        return every_value(sizes)
    axes = sorted(range(len(sizes)), key=lambda axis: -sizes[axis])
    pairs = (frozenset(pair) for pair in itertools.combinations(_indices(sizes, axes), 2))
    missing = dict.fromkeys(pair for pair in pairs if len(dict(pair)) == 2)  # not two indices of one axis
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for axis in axes:
            if axis not in case:
                gains = {index: _gain(missing, case, (axis, index)) for index in _turned(len(cases), sizes[axis])}
                case[axis] = max(gains, key=gains.__getitem__)
        for pair in itertools.combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append(tuple(case[axis] for axis in range(len(sizes))))
    return sorted(cases)


def every_combination(sizes: Sequence[int]) -> list[Case]:
    """Return all combinations of indices."""
    return list(itertools.product(*map(range, sizes)))


def _indices(sizes: Sequence[int], axes: Iterable[int]) -> list[tuple[int, int]]:
    return [(axis, index) for axis in axes for index in range(sizes[axis])]


def _turned(by: int, size: int) -> list[int]:
    return [(by + index) % size for index in range(size)]  # where several add as much, each has its turn


def _gain(missing: dict[Any, None], case: dict[int, int], item: tuple[int, int]) -> int:
    return sum(frozenset({item, other}) in missing for other in case.items())


TIERS = {"fast": every_value, "pairs": every_pair, "all": every_combination}
TIER = os.environ.get("MICRO_TESTS", "pairs")
if TIER not in TIERS:
    raise ValueError(f"MICRO_TESTS must be one of {', '.join(TIERS)}, got '{TIER}'")


def grid(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over axes of values: ``@grid(row=TABLE, world_size=[1, 3], dtype=DTYPES)``."""
    values = [list(axis) for axis in axes.values()]
    cases = [
        tuple(axis[index] for axis, index in zip(values, case, strict=True))
        for case in TIERS[TIER]([len(axis) for axis in values])
    ]
    names = ["-".join(map(_name_of, case)) for case in cases]
    return pytest.mark.parametrize(tuple(axes), cases, ids=names)


def _name_of(value: Any) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return f"{value.__module__.rsplit('.', 1)[-1]}.{value.__name__}"
    return str(getattr(value, "name", value))
