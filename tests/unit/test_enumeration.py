"""Sets as numbers: every set comes back, and its code is as long as the logarithm of how many there are."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from micro import enumeration, kernels
from micro.index_codecs import Enumerative, Packed
from tests.drawn_indices import draw


def log2_choose(length: int, count: int) -> float:
    return math.log2(math.comb(length, count))


@pytest.fixture(params=["compiled", "in Python"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "in Python":
        monkeypatch.setattr(kernels, "enumerating_on", lambda device: None)
    return request.param


@pytest.mark.parametrize("length", range(8))
def test_all_sets_of_a_short_line_have_codes_of_their_own(either: str, length: int) -> None:
    for count in range(length + 1):
        codes = set()
        for chosen in combinations(range(length), count):
            wire = enumeration.encode(torch.tensor(chosen, dtype=torch.int64), length)
            assert wire.numel() == 2 * enumeration.num_words(count, length)
            assert enumeration.decode(wire, count, length).tolist() == list(chosen)
            codes.add(bytes(wire.tolist()))
        assert len(codes) == math.comb(length, count)


@pytest.mark.parametrize(
    ("length", "count"), [(319, 64), (1000, 1), (1000, 999), (4096, 64), (3000, 1500), (9001, 700)]
)
def test_drawn_sets_come_back_equal_with_and_without_numba(
    length: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for places in (draw(count, length, 1), range(count), range(length - count, length)):
        given = torch.tensor(list(places), dtype=torch.int64)
        wire = enumeration.encode(given, length)
        assert torch.equal(enumeration.decode(wire, count, length), given)
        with monkeypatch.context() as without:
            without.setattr(kernels, "enumerating_on", lambda device: None)
            assert torch.equal(enumeration.encode(given, length), wire)
            assert torch.equal(enumeration.decode(wire, count, length), given)


def test_a_carry_goes_through_words_that_are_full() -> None:
    words = np.array([7, 0xFFFF, 0xFFFF, 3], np.uint16)
    loops = kernels.enumerating_on(torch.device("cpu"))
    if loops is None:
        pytest.skip("numba is not installed")
    loops._carry(words, 3)
    assert words.tolist() == [8, 0, 0, 3]


@pytest.mark.parametrize(("length", "count"), [(2, 1), (100, 50), (319, 64), (5000, 40), (70000, 300)])
def test_the_length_is_the_logarithm_and_less_than_a_word(length: int, count: int) -> None:
    bits = 16 * enumeration.num_words(count, length)
    assert log2_choose(length, count) <= bits <= log2_choose(length, count) + 16.001


def test_the_length_is_known_for_long_lines_too() -> None:
    length, count = 2**31 - 1, 10**7  # Stirling's series; the entropy is an upper bound, this close
    p = count / length
    entropy = length * (-p * math.log2(p) - (1 - p) * math.log2(1 - p))
    assert entropy - 40 < 16 * enumeration.num_words(count, length) < entropy + 16 + 1.45 * count * length / 2**46


@pytest.mark.parametrize(("span", "count"), [(4096, 64), (11_181_642, 111_816), (11_181_642, 11_182), (10**6, 10**5)])
def test_indices_take_a_tenth_of_a_bit_more_than_the_entropy(span: int, count: int) -> None:
    p = count / span
    entropy = (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p  # of each index; the logarithm is a little less
    bits = 8 * Enumerative().num_bytes(count, span) / count
    assert bits <= entropy + 0.1 + 24 / count
    assert bits < 8 * Packed().num_bytes(count, span) / count - 0.3
    finer = 8 * Enumerative(finer=6).num_bytes(count, span) / count
    assert finer <= entropy + 0.015 + 24 / count


def test_a_fineness_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"finer of enumerative must be in \[0, 8\], got 9"):
        Enumerative(finer=9)
