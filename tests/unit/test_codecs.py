"""Codecs of values and of indices: what all promise, and each against brute force."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import micro
from micro import kernels
from micro.codecs import coding
from micro.codecs.bits import num_packed_bytes, pack, unpack
from micro.codecs.fp8 import FP8
from micro.codecs.indices import Bitmap, IndexCodec, Int32, Packed, Shortest
from micro.codecs.int8 import Int8
from micro.codecs.qsgd import QSGD
from micro.codecs.sign import Sign
from micro.codecs.two_means import TwoMeans
from micro.zoo.range_float import RangeFloat
from micro.zoo.terngrad import TernGrad
from tests.parts import normal
from tests.products import grid
from tests.sizes import Size, coded, ternary

KEY = (1, 2, 3)
BLOCK = 16  # short, so that a message of the tests has several blocks and a torn one
COUNT = 5 * BLOCK + 7
DTYPES = [torch.float32, torch.float64]


@dataclass(frozen=True)
class Case:
    """A codec, the bytes that it takes, and whether its rounding is random, unbiased, or along the values."""

    codec: micro.Codec
    size: Size
    is_random: bool = False
    is_unbiased: bool = False
    is_least_squares: bool = False


def unbiased(codec: micro.Codec, size: Size) -> Case:
    return Case(codec, size, is_random=True, is_unbiased=True)


def along(codec: micro.Codec, size: Size) -> Case:
    return Case(codec, size, is_random=True, is_least_squares=True)


CASES = {
    "half": Case(micro.Half(), coded(16, header=0)),
    "int8": Case(Int8(block=BLOCK), coded(8, block=BLOCK)),
    "fp8": Case(FP8(block=BLOCK), coded(8, block=BLOCK)),
    "range_float": Case(RangeFloat(), coded(8)),
    "range_float, 11 bits": Case(RangeFloat(bits=11, mantissa=6), coded(11)),
    "range_float, 16 bits": Case(RangeFloat(bits=16), coded(16)),
    "sign": Case(Sign(block=BLOCK), coded(1, block=BLOCK)),
    "two_means": Case(TwoMeans(block=BLOCK), coded(2, block=BLOCK, header=8)),
    "two_means as published": Case(TwoMeans(rule="published"), coded(8, header=16)),
    "qsgd": along(QSGD(block=BLOCK), coded(4, block=BLOCK)),
    "qsgd, 9 bits": along(QSGD(block=BLOCK, bits=9), coded(9, block=BLOCK)),
    "terngrad": along(TernGrad(), ternary),
    "int8 at random": unbiased(Int8(block=BLOCK, stochastic=True), coded(8, block=BLOCK)),
    "qsgd as published": unbiased(QSGD(rule="published", block=BLOCK), coded(4, block=BLOCK)),
    "terngrad as published": unbiased(TernGrad(rule="published", clip=None), ternary),
}
UNBIASED = [name for name, case in CASES.items() if case.is_unbiased]
SOUND = [name for name in CASES if name not in UNBIASED]


def values_of(count: int = COUNT, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return normal(count, seed=seed, dtype=dtype)


def through(codec: micro.Codec, values: Tensor, key: tuple[int, ...] = KEY) -> Tensor:
    return coding.decode(codec, coding.encode(codec, values, key), values.numel(), values.dtype)


def at_odd_address(data: Tensor) -> Tensor:
    """Return the bytes as they lie in a longer message."""
    return torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]


def blocks_of(values: Tensor, block: int = BLOCK) -> list[list[float]]:
    return [part.tolist() for part in values.double().split(block)]


# --- what every codec promises ----------------------------------------------------------------------------------------


@grid(name=CASES, dtype=DTYPES)
def test_a_message_has_the_bytes_that_are_claimed(name: str, dtype: torch.dtype) -> None:
    codec, size = CASES[name].codec, CASES[name].size
    for count in (0, 1, 5, BLOCK, BLOCK + 1, 1023, 1025, 2600):
        values = values_of(count, dtype)
        wire = coding.encode(codec, values, KEY)
        assert torch.equal(values, values_of(count, dtype)), "it changes the values"
        assert (wire.dtype, wire.numel(), codec.num_bytes(count, dtype)) == (torch.uint8, size(count), size(count))
        decoded = coding.decode(codec, wire, count, dtype)
        assert (decoded.numel(), decoded.dtype) == (count, dtype)
        assert torch.equal(coding.decode(codec, at_odd_address(wire), count, dtype), decoded)


@grid(name=CASES)
def test_bytes_depend_on_the_key_where_rounding_is_random_and_on_nothing_else(name: str) -> None:
    one, same, other = (CASES[name].codec.encode(values_of(), key) for key in (KEY, KEY, (1, 2, 4)))
    assert torch.equal(one, same)
    assert torch.equal(one, other) != CASES[name].is_random


UNUSUAL = [
    torch.tensor([3.0]),
    torch.tensor([1e30, -2e30, 3.4e38, -3.4e38, 1.0]),
    torch.tensor([1e-38, -1e-38, 1.4e-45, 0.0, -1e-40]),
    torch.tensor([1e30, 1e-38, -1.0, 0.0]),
    torch.tensor([1e300, -1e-300, 1e39, 0.0], dtype=torch.float64),
    torch.tensor([1e-300, -1e-200], dtype=torch.float64),
    torch.full((2000,), 3.4e38),
    torch.full((2000,), -1e-38),
]


@grid(name=CASES)
def test_finite_values_stay_finite_and_zeros_zero(name: str) -> None:
    for values in UNUSUAL:
        assert torch.isfinite(through(CASES[name].codec, values)).all()
    for dtype in DTYPES:
        assert not through(CASES[name].codec, torch.zeros(COUNT, dtype=dtype)).any()


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "heavy tails": lambda x: x**7,
    "tied": torch.sign,
    "one-sided": lambda x: 5 + x,
    "nearly all zero": lambda x: x * (torch.arange(x.numel()) % 9 == 0),
    "of two scales": lambda x: torch.where(torch.arange(x.numel()) % 2 == 0, x, 1e-6 * x),
}


@grid(name=SOUND, shape=SHAPES)
def test_what_is_left_is_less_than_what_was_there(name: str, shape: str) -> None:
    for seed in range(5):
        values = SHAPES[shape](values_of(dtype=torch.float64, seed=seed))
        assert (values - through(CASES[name].codec, values)).norm() < values.norm()


@pytest.mark.slow
@grid(name=UNBIASED, dtype=DTYPES)
def test_mean_over_draws_is_the_value(name: str, dtype: torch.dtype) -> None:
    draws, values = 1000, values_of(2 * BLOCK + 3, dtype)
    drawn = torch.stack([through(CASES[name].codec, values, (draw, 0)) for draw in range(draws)]).double()
    standard_error = drawn.std(0) / draws**0.5
    assert (standard_error > 0).any()
    assert ((drawn.mean(0) - values.double()).abs() <= 4 * standard_error + 1e-3 * values.double().abs()).all()


@grid(name=[name for name, case in CASES.items() if case.is_least_squares])
def test_least_squares_leaves_nothing_along_the_code(name: str) -> None:
    codec, values = CASES[name].codec, values_of(dtype=torch.float64)
    for plain, code in zip(*(x.split(codec.block) for x in (values, through(codec, values))), strict=True):
        assert float((plain - code) @ code) == pytest.approx(0, abs=1e-5 * float(plain @ plain))
        assert code.any()


# --- each against brute force -----------------------------------------------------------------------------------------


def nearest_multiples(block: list[float]) -> list[float]:
    step = max(map(abs, block)) / 127
    return [min((abs(v - k * step), k * step) for k in range(-127, 128))[1] for v in block]


def nearest_floats(block: list[float]) -> list[float]:
    scale = max(map(abs, block)) / 448
    line = [m * 2.0**e for e in range(-9, 6) for m in range(16)]  # four bits of significand, subnormal ones from 2^-9
    return [min((abs(abs(v) - x * scale), math.copysign(x * scale, v)) for x in line if x <= 448)[1] for v in block]


def mean_magnitudes(block: list[float]) -> list[float]:
    mean = sum(map(abs, block)) / len(block)
    return [-mean if v < 0 else mean for v in block]


ORACLES: dict[micro.Codec, Callable[[list[float]], list[float]]] = {
    Int8(block=BLOCK): nearest_multiples,
    FP8(block=BLOCK): nearest_floats,
    Sign(block=BLOCK): mean_magnitudes,
}


@grid(codec=ORACLES, offset=[0.0, 9.0, -9.0], dtype=DTYPES)
def test_each_value_is_what_brute_force_gives(codec: micro.Codec, offset: float, dtype: torch.dtype) -> None:
    values = values_of(dtype=dtype) + offset
    expected = torch.tensor([v for block in blocks_of(values) for v in ORACLES[codec](block)], dtype=torch.float64)
    torch.testing.assert_close(through(codec, values).double(), expected, rtol=1e-6, atol=1e-9)


@grid(bits=[2, 4, 8])
def test_qsgd_as_published_is_a_neighbouring_level_of_the_norm(bits: int) -> None:
    values, codec = values_of(), QSGD(rule="published", bits=bits, block=BLOCK)
    for plain, codes in zip(values.double().split(BLOCK), through(codec, values).double().split(BLOCK), strict=True):
        level = plain.norm() / (2 ** (bits - 1) - 1)
        torch.testing.assert_close(codes / level, (codes / level).round(), rtol=0, atol=1e-4)
        assert ((codes / level).round() - plain / level).abs().max() < 1


def test_terngrad_as_published_is_the_cut_largest_or_nothing() -> None:
    values = values_of(2000)
    decoded = through(TernGrad(rule="published"), values)
    for plain, codes in zip(values.double().split(1024), decoded.double().split(1024), strict=True):
        limit = 2.5 * plain.square().mean().sqrt()
        assert limit < plain.abs().max()
        assert {round(float(code), 5) for code in codes.abs() / limit} == {0.0, 1.0}
        assert (codes * plain >= 0).all()
        assert codes[plain.abs() > limit * 1.0001].all()


def lost(codec: micro.Codec, values: Tensor) -> float:
    return float((values - through(codec, values)).norm() / values.norm()) ** 2


def test_two_magnitudes_leave_the_least_of_all_cuts_of_a_block() -> None:
    values = values_of(24)
    ordered = values.abs().sort().values
    splits = [(ordered[:cut], ordered[cut:]) for cut in range(1, 24)]
    errors = [sum(float(((half - half.mean()) ** 2).sum()) for half in split) for split in splits]
    assert lost(TwoMeans(), values) == pytest.approx(min(errors) / float(values.norm()) ** 2, rel=0.05)


def test_the_published_levels_equal_sparselocos_public_code() -> None:
    values = [0.1, 0.2, -0.1, 3.0, -4.0, 0.5]
    mean = sum(values) / 6
    sigma = (sum((value - mean) ** 2 for value in values) / 5) ** 0.5
    levels = [min(max(round((value - mean) / (1.5 * sigma) + 2), 0), 3) for value in values]
    expected = [sum(v for v, other in zip(values, levels, strict=True) if other == own) for own in levels]
    expected = [total / levels.count(own) for total, own in zip(expected, levels, strict=True)]
    assert through(TwoMeans(rule="published"), torch.tensor(values)).tolist() == pytest.approx(expected)
    assert len(set(levels)) > 2


def number_line(largest: float, bits: int, mantissa: int) -> list[float]:
    """Return the magnitudes of the format, ascending from 0: floats of ``mantissa`` bits counted down from the top."""
    significand, exponent = math.frexp(largest)  # largest = significand * 2**exponent, significand in [1/2, 1)
    units = math.floor(significand * 2 ** (mantissa + 1) + 0.5)
    line = []
    for _ in range(2 ** (bits - 1) - 1):
        line.append(units * 2.0 ** (exponent - mantissa - 1))
        units -= 1
        if units < 2**mantissa:
            units, exponent = 2 ** (mantissa + 1) - 1, exponent - 1
    return [0.0, *reversed(line)]


@pytest.mark.parametrize(("bits", "mantissa"), [(4, 0), (4, 2), (8, 0), (8, 4), (8, 7), (10, 5), (12, 4), (16, 10)])
def test_range_float_is_the_nearest_of_its_numbers(bits: int, mantissa: int) -> None:
    values = torch.cat([values_of(), 1e-2 * values_of(seed=1), 1e-4 * values_of(seed=2), torch.zeros(1)])
    line = torch.tensor(number_line(values.abs().max().item(), bits, mantissa), dtype=torch.float64)
    nearest = line[(values.double().abs()[:, None] - line).abs().argmin(1)] * values.sign()
    assert torch.equal(through(RangeFloat(bits=bits, mantissa=mantissa), values).double(), nearest)


@grid(bits=[4, 6, 8, 12], shape=["normal", "heavy tails", "one-sided"])
def test_the_mantissa_is_the_best_there_is(bits: int, shape: str) -> None:
    values = SHAPES[shape](values_of(1000))
    codecs = [RangeFloat(bits=bits), *(RangeFloat(bits=bits, mantissa=m) for m in range(max(0, bits - 8), bits))]
    chosen, *errors = [float((through(codec, values) - values).double().norm()) for codec in codecs]
    assert chosen == pytest.approx(min(errors), rel=1e-6)


# --- indices ----------------------------------------------------------------------------------------------------------

INDEX_CODECS = [Int32(), Bitmap(), Packed(), Shortest()]


def bits_of(data: Tensor) -> list[int]:
    return [byte >> place & 1 for byte in data.tolist() for place in range(8)]


@grid(width=range(1, 33), count=[0, 1, 9, 41, 1000], dtype=[torch.int32, torch.int64], tried=[(), kernels.TRIED])
def test_codes_lie_side_by_side_lowest_bit_first(
    width: int, count: int, dtype: torch.dtype, tried: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TRIED", tried)
    randomness = random.Random(width * 100 + count)
    codes = [0, 2**width - 1, *(randomness.getrandbits(width) for _ in range(count))][:count]
    packed = pack(torch.tensor(codes, dtype=torch.int64).to(dtype), width)  # with 32 bits, some are negative
    assert (packed.dtype, packed.numel()) == (torch.uint8, num_packed_bytes(count, width))
    expected = [code >> place & 1 for code in codes for place in range(width)]
    assert bits_of(packed) == expected + [0] * (-len(expected) % 8)
    for data in (packed, at_odd_address(packed)):
        assert unpack(data, count, width).long().tolist() == codes


SPANS = [(0, 0), (0, 9), (1, 1), (1, 2**31 - 1), (5, 5), (7, 8), (3, 1000), (64, 4096), (100, 333), (999, 1000)]


@grid(codec=INDEX_CODECS, case=SPANS)
def test_indices_come_back_from_the_bytes_that_are_claimed(
    codec: IndexCodec, case: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, span = case
    if span > 10**6 and codec.name == "bitmap":
        return  # 256 MiB of bits
    indices = torch.tensor(sorted(random.Random(0).sample(range(span), count)), dtype=torch.int32)
    expected = codec.encode(indices, span)
    for tried in ((), kernels.TRIED):
        monkeypatch.setattr(kernels, "TRIED", tried)
        wire = codec.encode(indices, span)
        assert (wire.dtype, wire.numel()) == (torch.uint8, codec.num_bytes(count, span))
        assert torch.equal(wire, expected)
        found = codec.decode(at_odd_address(wire), count, span)
        assert found.dtype == torch.int32
        assert torch.equal(found, indices)


@pytest.mark.parametrize("density", [0.5, 0.25, 0.1, 0.03, 0.01, 0.0001])
def test_packed_indices_take_the_logarithm_of_the_density_and_two_bits(density: float) -> None:
    span = 10_000_000
    count = int(density * span)
    bits = 8 * Packed().num_bytes(count, span) / count
    assert bits <= math.log2(1 / density) + 2 + 16 / count
    entropy = (-density * math.log2(density) - (1 - density) * math.log2(1 - density)) / density
    assert entropy <= bits <= entropy + 0.6 + 0.5 * (density > 0.2)


@grid(codec=INDEX_CODECS, span=[1, 7, 100, 1000])
def test_shorter_lists_take_at_most_the_stated_bytes_and_shortest_is_the_shortest_form(
    codec: IndexCodec, span: int
) -> None:
    longest = 0
    for count in range(span + 1):
        size = codec.num_bytes(count, span)
        longest = max(longest, size)
        assert longest <= codec.most_bytes(count, span) <= size + 1 + (count == 0) * span
        assert Shortest().num_bytes(count, span) <= size
