"""Codes of few bits, against brute force in double precision."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import micro
from micro.codecs.int8 import Int8
from micro.codecs.qsgd import QSGD
from micro.codecs.sign import Sign
from micro.codecs.two_means import TwoMeans
from micro.comm import Comm
from micro.requests import carried_out
from micro.selectors.everything import Everything
from micro.zoo.natural import Natural
from micro.zoo.onebit import OneBit
from micro.zoo.range_float import Format, RangeFloat
from micro.zoo.terngrad import TernGrad, pack_ternary, unpack_ternary
from tests.products import grid
from tests.sizes import Size, coded, ternary

KEY = (1, 2, 3)
BLOCK = 16  # short, so that a message of the tests has several blocks and a torn one
COUNT = 5 * BLOCK + 7

DETERMINISTIC: dict[str, tuple[micro.Codec, Size]] = {
    "int8": (Int8(block=BLOCK), coded(8, block=BLOCK)),
    "natural": (Natural(), coded(8)),
    "onebit": (OneBit(block=BLOCK), coded(1, block=BLOCK, header=8)),
    "range_float": (RangeFloat(), coded(8)),
    "range_float, 4 bits": (RangeFloat(bits=4), coded(4)),
    "range_float, 11 bits": (RangeFloat(bits=11, mantissa=6), coded(11)),
    "range_float, 16 bits": (RangeFloat(bits=16), coded(16)),
    "sign": (Sign(block=BLOCK), coded(1, block=BLOCK)),
    "two_means": (TwoMeans(block=BLOCK), coded(2, block=BLOCK, header=8)),
    "two_means as published": (TwoMeans(rule="published"), coded(8, header=16)),
}
LEAST_SQUARES: dict[str, tuple[micro.Codec, Size]] = {
    "qsgd": (QSGD(block=BLOCK), coded(4, block=BLOCK)),
    "qsgd, 2 bits": (QSGD(block=BLOCK, bits=2), coded(2, block=BLOCK)),
    "qsgd, 9 bits": (QSGD(block=BLOCK, bits=9), coded(9, block=BLOCK)),
    "terngrad": (TernGrad(), ternary),
    "terngrad, uncut": (TernGrad(clip=None), ternary),
}
UNBIASED: dict[str, tuple[micro.Codec, Size]] = {
    "int8 at random": (Int8(block=BLOCK, stochastic=True), coded(8, block=BLOCK)),
    "natural as published": (Natural(rule="published"), coded(8)),
    "qsgd as published": (QSGD(rule="published", block=BLOCK), coded(4, block=BLOCK)),
    "qsgd as published, 8 bits": (QSGD(rule="published", block=BLOCK, bits=8), coded(8, block=BLOCK)),
    "terngrad as published": (TernGrad(rule="published", clip=None), ternary),
}
ALL = DETERMINISTIC | LEAST_SQUARES | UNBIASED
SOUND = DETERMINISTIC | LEAST_SQUARES

every_codec = pytest.mark.parametrize("name", ALL)
random_codecs = pytest.mark.parametrize("name", LEAST_SQUARES | UNBIASED)
DTYPES = [torch.float32, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(count: int = COUNT, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through(codec: micro.Codec, values: Tensor, key: tuple[int, ...] = KEY) -> Tensor:
    return codec.decode(codec.encode(values, key), values.numel(), values.dtype)


def blocks_of(values: Tensor, block: int = BLOCK) -> list[list[float]]:
    plain = values.double().tolist()
    return [plain[first : first + block] for first in range(0, len(plain), block)]


# --- what every codec promises ----------------------------------------------------------------------------------------


@grid(name=ALL, dtype=DTYPES, count=[0, 1, 2, 5, BLOCK, BLOCK + 1, 1023, 1024, 1025, 2600])
def test_bytes_on_the_wire_are_those_claimed(name: str, dtype: torch.dtype, count: int) -> None:
    codec, size = ALL[name]
    wire = codec.encode(normal(count, dtype), KEY)
    assert wire.dtype is torch.uint8
    assert wire.shape == (size(count),)
    assert codec.num_bytes(count, dtype) == size(count)
    decoded = codec.decode(wire, count, dtype)
    assert decoded.shape == (count,)
    assert decoded.dtype is dtype


UNUSUAL: dict[str, tuple[torch.dtype, list[float]]] = {
    "one value": (torch.float32, [3.0]),
    "large": (torch.float32, [1e30, -2e30, 3.4e38, -3.4e38, 1.0]),
    "small": (torch.float32, [1e-38, -1e-38, 1.4e-45, 0.0, -1e-40]),
    "large and small": (torch.float32, [1e30, 1e-38, -1.0, 0.0]),
    "beyond single precision": (torch.float64, [1e300, -1e-300, 1e39, 0.0]),
    "beneath single precision": (torch.float64, [1e-300, -1e-200]),
    "many large": (torch.float32, [3.4e38] * 2000),
    "many small": (torch.float32, [-1e-38] * 2000),
}


@grid(name=ALL, kind=UNUSUAL)
def test_finite_values_stay_finite(name: str, kind: str) -> None:
    dtype, plain = UNUSUAL[kind]
    values = torch.tensor(plain, dtype=dtype)
    assert torch.isfinite(through(ALL[name][0], values)).all()


@grid(name=ALL, dtype=DTYPES)
def test_zeros_stay_zero(name: str, dtype: torch.dtype) -> None:
    assert not through(ALL[name][0], torch.zeros(COUNT, dtype=dtype)).any()


@every_codec
def test_encoding_leaves_the_values_alone(name: str) -> None:
    values = normal()
    ALL[name][0].encode(values, KEY)
    assert torch.equal(values, normal())


@every_codec
def test_same_key_gives_the_same_bytes(name: str) -> None:
    codec = ALL[name][0]
    assert torch.equal(codec.encode(normal(), KEY), codec.encode(normal(), KEY))


@random_codecs
def test_another_key_gives_other_bytes(name: str) -> None:
    codec = ALL[name][0]
    assert not torch.equal(codec.encode(normal(), KEY), codec.encode(normal(), (1, 2, 4)))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_what_is_not_random_does_not_look_at_the_key(name: str) -> None:
    codec = DETERMINISTIC[name][0]
    assert torch.equal(codec.encode(normal(), KEY), codec.encode(normal(), (9,)))


@every_codec
def test_a_message_may_lie_anywhere_in_a_larger_one(name: str) -> None:
    codec = ALL[name][0]
    wire = codec.encode(normal(), KEY)
    larger = torch.cat([torch.zeros(3, dtype=torch.uint8), wire])
    assert torch.equal(codec.decode(larger[3:], COUNT, torch.float32), codec.decode(wire, COUNT, torch.float32))


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
        values = SHAPES[shape](normal(dtype=torch.float64, seed=seed))
        assert (values - through(SOUND[name][0], values)).norm() < values.norm()


@pytest.mark.slow
@grid(name=UNBIASED, dtype=DTYPES)
def test_mean_over_draws_is_the_value(name: str, dtype: torch.dtype) -> None:
    draws, values = 1000, normal(2 * BLOCK + 3, dtype)
    drawn = torch.stack([through(UNBIASED[name][0], values, (draw, 0)) for draw in range(draws)]).double()
    standard_error = drawn.std(0) / draws**0.5
    assert (standard_error > 0).any()
    assert ((drawn.mean(0) - values.double()).abs() <= 4 * standard_error + 1e-3 * values.double().abs()).all()


# --- each against brute force -----------------------------------------------------------------------------------------


@every_dtype
def test_int8_is_the_nearest_of_255_multiples(dtype: torch.dtype) -> None:
    values, expected = normal(dtype=dtype), []
    for block in blocks_of(values):
        step = max(map(abs, block)) / 127
        expected += [min((abs(v - k * step), k * step) for k in range(-127, 128))[1] for v in block]
    torch.testing.assert_close(
        through(Int8(block=BLOCK), values).double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-9
    )


def test_int8_at_random_gives_a_neighbour() -> None:
    values, codec = normal(), Int8(block=BLOCK, stochastic=True)
    decoded = through(codec, values).double().tolist()
    for place, block in enumerate(blocks_of(values)):
        step = max(map(abs, block)) / 127
        for offset, value in enumerate(block):
            assert abs(decoded[place * BLOCK + offset] - value) < step * (1 + 1e-5)


@every_dtype
def test_sign_is_the_mean_magnitude(dtype: torch.dtype) -> None:
    values, expected = normal(dtype=dtype), []
    for block in blocks_of(values):
        mean = sum(map(abs, block)) / len(block)
        expected += [-mean if v < 0 else mean for v in block]
    torch.testing.assert_close(
        through(Sign(block=BLOCK), values).double(), torch.tensor(expected).double(), rtol=1e-6, atol=0
    )


@grid(dtype=DTYPES, offset=[0.0, 9.0, -9.0])
def test_onebit_is_the_mean_of_its_side(dtype: torch.dtype, offset: float) -> None:
    values, expected = normal(dtype=dtype) + offset, []
    for block in blocks_of(values):
        sides = [[v for v in block if (v < 0) == negative] for negative in (False, True)]
        means = [sum(side) / len(side) if side else 0.0 for side in sides]
        expected += [means[v < 0] for v in block]
    torch.testing.assert_close(
        through(OneBit(block=BLOCK), values).double(), torch.tensor(expected).double(), rtol=1e-6, atol=0
    )


def test_natural_is_the_nearest_power_of_two() -> None:
    values = torch.cat([normal(), 1e-9 * normal(seed=1), torch.tensor([0.0, 1.0, -4.0])])
    powers = [2.0**e for e in range(-60, 10)]
    expected = [math.copysign(min((abs(abs(v) - p), p) for p in powers)[1], v) if v else 0.0 for v in values.tolist()]
    assert through(Natural(), values).tolist() == expected


def test_natural_loses_a_ninth_at_most() -> None:
    values = torch.linspace(1, 4, 999)
    errors = (values - through(Natural(), values)) / values
    assert errors.abs().max() == pytest.approx(1 / 3, rel=1e-2)


def test_natural_at_random_gives_one_of_the_powers_around() -> None:
    values = normal()
    for value, decoded in zip(values.tolist(), through(Natural(rule="published"), values).tolist(), strict=True):
        assert abs(decoded) in (2.0 ** math.floor(math.log2(abs(value))), 2.0 ** math.ceil(math.log2(abs(value))))
        assert (decoded < 0) == (value < 0)


def test_natural_spends_no_power_above_the_largest() -> None:
    values = torch.tensor([2.0**-20, 2.0**-140, 2.0**-146, 2.0**-149])
    assert through(Natural(), values).tolist() == [2.0**-20, 0.0, 0.0, 0.0]  # beneath single precision's own powers
    values = torch.tensor([2.0**100, 2.0**-26, 2.0**-27])
    assert through(Natural(), values).tolist() == [2.0**100, 2.0**-26, 0.0]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_as_published_is_a_neighbouring_level_of_the_norm(bits: int) -> None:
    values, levels = normal(), 2 ** (bits - 1) - 1
    decoded = through(QSGD(rule="published", bits=bits, block=BLOCK), values).double().tolist()
    for place, block in enumerate(blocks_of(values)):
        level = math.sqrt(sum(v * v for v in block)) / levels
        for offset, value in enumerate(block):
            multiple = decoded[place * BLOCK + offset] / level
            assert multiple == pytest.approx(round(multiple), abs=1e-4)
            assert round(multiple) in (math.floor(value / level), math.ceil(value / level))


def test_terngrad_as_published_is_the_cut_largest_or_nothing() -> None:
    values = normal(2000)
    decoded = through(TernGrad(rule="published"), values)
    for plain, codes in zip(blocks_of(values, 1024), blocks_of(decoded, 1024), strict=True):
        limit = 2.5 * math.sqrt(sum(v * v for v in plain) / len(plain))
        assert limit < max(map(abs, plain))
        assert {round(abs(code) / limit, 5) for code in codes} == {0.0, 1.0}
        assert all(code * v >= 0 for code, v in zip(codes, plain, strict=True))
        assert all(code for code, v in zip(codes, plain, strict=True) if abs(v) > limit * 1.0001)


@pytest.mark.parametrize("name", LEAST_SQUARES)
def test_least_squares_leaves_nothing_along_the_code(name: str) -> None:
    codec, values = LEAST_SQUARES[name][0], normal(dtype=torch.float64)
    decoded = through(codec, values)
    for plain, codes in zip(blocks_of(values, codec.block), blocks_of(decoded, codec.block), strict=True):  # type: ignore[attr-defined]
        along = sum((v - c) * c for v, c in zip(plain, codes, strict=True))
        assert along == pytest.approx(0, abs=1e-5 * sum(v * v for v in plain))
        assert any(codes)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 23])
def test_ternary_digits_are_packed_by_five(count: int) -> None:
    codes = torch.randint(-1, 2, (count,), generator=torch.Generator().manual_seed(count)).float()
    digits = [int(code) + 1 for code in codes.tolist()]
    expected = [sum(d * 3**i for i, d in enumerate(digits[first : first + 5])) for first in range(0, count, 5)]
    assert pack_ternary(codes).tolist() == expected
    assert torch.equal(unpack_ternary(pack_ternary(codes), count), codes)


# --- the range-based float --------------------------------------------------------------------------------------------

FORMATS = [(4, 0), (4, 2), (6, 1), (8, 0), (8, 3), (8, 4), (8, 7), (10, 5), (12, 4), (16, 10)]
every_format = pytest.mark.parametrize(("bits", "mantissa"), FORMATS)


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


def format_of(largest: float, bits: int, mantissa: int) -> Format:
    return Format.ending_at(torch.tensor(largest), bits, torch.tensor(mantissa, dtype=torch.int32))


@every_format
@pytest.mark.parametrize("largest", [1.0, 0.7371, 3e-5, 1e20])
def test_codes_count_along_the_number_line(bits: int, mantissa: int, largest: float) -> None:
    form = format_of(largest, bits, mantissa)
    codes = torch.arange(2 ** (bits - 1), dtype=torch.int32)
    decoded = form.magnitudes(codes)
    expected = number_line(torch.tensor(largest).item(), bits, mantissa)
    if expected[1] > 2.0**-126:  # single precision's own end
        assert decoded.tolist() == expected
    assert torch.isfinite(decoded).all()
    assert (decoded.diff() > 0).all()
    assert torch.equal(form.codes(decoded), codes)
    assert torch.equal(form.codes(-decoded), codes)


@every_format
def test_range_float_is_the_nearest_of_its_numbers(bits: int, mantissa: int) -> None:
    values = torch.cat([normal(), 1e-2 * normal(seed=1), 1e-4 * normal(seed=2), torch.zeros(1)])
    line = torch.tensor(number_line(values.abs().max().item(), bits, mantissa), dtype=torch.float64)
    nearest = line[(values.double().abs()[:, None] - line).abs().argmin(1)] * values.sign()
    assert torch.equal(through(RangeFloat(bits=bits, mantissa=mantissa), values).double(), nearest)


@every_format
def test_range_float_keeps_its_relative_error_inside_the_range(bits: int, mantissa: int) -> None:
    values = normal(2000).sort().values
    smallest = number_line(values.abs().max().item(), bits, mantissa)[1]
    inside = values.abs() >= smallest
    errors = (through(RangeFloat(bits=bits, mantissa=mantissa), values) - values).double() / values
    assert inside.any()
    assert errors[inside].abs().max() <= 2.0 ** -(mantissa + 1)
    assert errors.abs().max() <= 1


@grid(bits=[4, 6, 8, 12], shape=["normal", "heavy tails", "one-sided"])
def test_the_mantissa_is_the_best_there_is(bits: int, shape: str) -> None:
    values = SHAPES[shape](normal(1000))
    fewest = max(0, bits - 8)
    errors = [
        (through(RangeFloat(bits=bits, mantissa=m), values) - values).double().norm().item()
        for m in range(fewest, bits)
    ]
    chosen = through(RangeFloat(bits=bits), values)
    assert (chosen - values).double().norm().item() == pytest.approx(min(errors), rel=1e-6)


def test_eight_bits_lose_little_of_a_normal_gradient() -> None:
    values = normal(100_000)  # more than the sample
    assert (values - through(RangeFloat(), values)).norm() < 0.02 * values.norm()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_everything_is_every_index_and_saves_none() -> None:
    selector, comm = Everything(), Comm()
    state = selector.start()
    step = micro.sparse.Step(0, 5, 0, micro.Layout.flat(5))
    for numel in (5, 5, 3):
        chosen = carried_out(selector.select(state, torch.ones(numel), step, comm), comm)
        assert chosen.indices.tolist() == list(range(numel))
    assert selector.save(state) == {}
    assert selector.load({}) == selector.start()
