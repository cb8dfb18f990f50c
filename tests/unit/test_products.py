"""What a grid of cases leaves out is never a value, nor a pair of values."""

from itertools import combinations, product

import pytest

from tests.products import Case, every_combination, every_pair, every_value

SIZES = [(1,), (4,), (1, 1), (3, 2), (78, 7, 2, 2), (3, 2, 4, 8), (2, 2, 2, 2, 2), (5, 5, 5)]


def pairs_in(cases: list[Case]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_value_of_every_axis_is_in_a_case(sizes: Case) -> None:
    for cases in (every_value(sizes), every_pair(sizes)):
        assert [{case[axis] for case in cases} for axis in range(len(sizes))] == [set(range(size)) for size in sizes]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_two_values_are_together_in_a_case(sizes: Case) -> None:
    cases = every_pair(sizes)
    assert pairs_in(cases) == pairs_in(every_combination(sizes))
    assert len(set(cases)) == len(cases)
    assert cases == every_pair(sizes)  # the same on all processes of a test run


def test_cases_are_hardly_more_than_the_two_longest_axes_need() -> None:
    assert len(every_pair((78, 7, 2, 2))) == 78 * 7
    assert len(every_pair((3, 2, 4, 8))) == 4 * 8
    assert len(every_combination((3, 2, 4, 8))) == len(set(product(range(3), range(2), range(4), range(8))))
