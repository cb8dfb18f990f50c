"""Compiled codes of which each is made of one value alone: half precision, bfloat16, powers of two.

Wires are bytes at any address. ``rest`` is what a code leaves of its values: it becomes ``values - decoded``, or, with
a weight other than zero, has weight times that added; an empty one is left alone. Values and rest may be one vector.
"""

from typing import Any

import numpy as np

from micro.kernels.jit import INFINITY_BITS, MAGNITUDE_BITS, as_float, get16, jitted, put16
from micro.kernels.noise import noise

TILE = 1 << 12  # elements that stay in the nearest cache from one loop to the next
LARGEST_HALF = 0x477FE000  # 65504 as a float32
SMALLEST_HALF = 0x38800000  # 2^-14: below it halves are multiples of 2^-24
LARGEST_BFLOAT16 = 0x7F7F0000
HALF_NAN = 0x7E00
NARROW_BY = 13  # bits of mantissa that half precision lacks
REBIAS = 112 << 23  # between the exponents of single and of half precision
MANTISSA = 23
NUM_POWERS = 127
HIGHEST = 254  # the exponent field of 2**127


@jitted
def _half(bits: Any) -> Any:
    """Return the half nearest to a float32, cut at the largest; NaN stays NaN."""
    magnitude = bits & np.int32(MAGNITUDE_BITS)
    cut = min(magnitude, np.int32(LARGEST_HALF))
    odd = (cut >> np.int32(NARROW_BY)) & np.int32(1)
    normal = (cut + np.int32(0xFFF) + odd - np.int32(REBIAS)) >> np.int32(NARROW_BY)
    small = np.int32(np.rint(as_float(min(cut, np.int32(SMALLEST_HALF))) * np.float32(2.0**24)))
    code = normal if cut >= np.int32(SMALLEST_HALF) else small
    code = np.int32(HALF_NAN) if magnitude > np.int32(INFINITY_BITS) else code
    return np.int32(code | ((bits >> np.int32(16)) & np.int32(0x8000)))


@jitted
def of_half(code: Any) -> Any:
    """Return the float32 that a half stands for."""
    magnitude = np.int32(code & np.int32(0x7FFF))
    normal = as_float(np.int32((magnitude << np.int32(NARROW_BY)) + np.int32(REBIAS)))
    value = normal if magnitude >= np.int32(0x400) else np.float32(magnitude) * np.float32(2.0**-24)
    endless = as_float(np.int32((magnitude << np.int32(NARROW_BY)) + np.int32(2 * REBIAS)))  # or no number
    value = endless if magnitude >= np.int32(0x7C00) else value
    return -value if code >= np.int32(0x8000) else value


@jitted
def _bfloat16(bits: Any) -> Any:
    """Return the bfloat16 nearest to a float32, cut at the largest; NaN stays NaN."""
    magnitude = bits & np.int32(MAGNITUDE_BITS)
    cut = min(magnitude, np.int32(LARGEST_BFLOAT16))
    odd = (cut >> np.int32(16)) & np.int32(1)
    code = (cut + np.int32(0x7FFF) + odd) >> np.int32(16)
    code = np.int32(0x7FC0) if magnitude > np.int32(INFINITY_BITS) else code
    return np.int32(code | ((bits >> np.int32(16)) & np.int32(0x8000)))


@jitted
def of_bfloat16(code: Any) -> Any:
    """Return the float32 that a bfloat16 stands for."""
    return as_float(np.int32(code << np.int32(16)))


@jitted
def leave(rest: Any, values: Any, decoded: Any, weight: Any) -> Any:
    """Write into ``rest`` what ``decoded`` lacks of ``values``, or add ``weight`` times that."""
    if weight == 0:
        for i in range(values.size):
            rest[i] = values[i] - decoded[i]
    else:
        for i in range(values.size):
            rest[i] += weight * (values[i] - decoded[i])


@jitted
def divide(values: Any, divisor: Any) -> Any:
    """Divide the values, in place."""
    if divisor != 1:
        for i in range(values.size):
            values[i] /= divisor


@jitted
def encode_cast(values: Any, bits: Any, wire: Any, rest: Any, weight: Any, is_half: Any) -> Any:
    """Fill ``wire`` (2 numel,) with the values in 16 bits each."""
    decoded = np.empty(TILE, np.float32)
    for start in range(0, values.size, TILE):
        source, codes = bits[start : start + TILE], wire[2 * start :]
        if is_half:
            for i in range(source.size):
                put16(codes, i, np.uint64(_half(source[i])))
        else:
            for i in range(source.size):
                put16(codes, i, np.uint64(_bfloat16(source[i])))
        if rest.size:
            if is_half:
                for i in range(source.size):
                    decoded[i] = of_half(np.int32(get16(codes, i)))
            else:
                for i in range(source.size):
                    decoded[i] = of_bfloat16(np.int32(get16(codes, i)))
            leave(rest[start : start + TILE], values[start : start + TILE], decoded, weight)


@jitted
def decode_cast(wires: Any, out: Any, divisor: Any, is_half: Any) -> Any:
    """Fill ``out`` with the sum over ``wires`` (R, at least 2 numel) of what they stand for, divided."""
    for start in range(0, out.size, TILE):
        target = out[start : start + TILE]
        for row in range(wires.shape[0]):
            codes = wires[row, 2 * start :]
            if row == 0:
                if is_half:
                    for i in range(target.size):
                        target[i] = of_half(np.int32(get16(codes, i)))
                else:
                    for i in range(target.size):
                        target[i] = of_bfloat16(np.int32(get16(codes, i)))
            elif is_half:
                for i in range(target.size):
                    target[i] += of_half(np.int32(get16(codes, i)))
            else:
                for i in range(target.size):
                    target[i] += of_bfloat16(np.int32(get16(codes, i)))
        divide(target, divisor)


@jitted
def _power(bits: Any, dither: Any) -> Any:
    """Return the exponent field of a magnitude after what ``dither`` (int32) carries into it."""
    exponent = np.int32((bits & np.int32(MAGNITUDE_BITS)) + dither) >> np.int32(MANTISSA)
    return min(np.int32(exponent), np.int32(HIGHEST))


@jitted
def _dither(is_random: Any, first: Any, second: Any, place: Any) -> Any:
    """Return half a mantissa, or a random mantissa."""
    return np.int32(noise(first, second, place) >> np.uint32(9)) if is_random else np.int32(1 << (MANTISSA - 1))


@jitted
def highest_power(bits: Any, is_random: Any, first: Any, second: Any) -> Any:
    """Return the largest exponent field after rounding, 0 of no values."""
    highest = np.int32(0)
    if is_random:
        for i in range(bits.size):
            highest = max(highest, _power(bits[i], _dither(True, first, second, i)))
    else:
        for i in range(bits.size):
            highest = max(highest, _power(bits[i], _dither(False, first, second, i)))
    return highest


@jitted
def _natural(bits: Any, dither: Any, below: Any) -> Any:
    negative = (bits < np.int32(0)) & ((bits & np.int32(MAGNITUDE_BITS)) != np.int32(0))
    return max(_power(bits, dither) - below, np.int32(0)) | (np.int32(negative) << np.int32(7))


@jitted
def _of_natural(code: Any, below: Any) -> Any:
    power = np.int32(code) & np.int32(NUM_POWERS)
    bits = ((power + below) << np.int32(MANTISSA)) if power > np.int32(0) else np.int32(0)
    return as_float(np.int32(bits | ((np.int32(code) >> np.int32(7)) << np.int32(31))))


@jitted
def encode_natural(
    values: Any, bits: Any, codes: Any, rest: Any, weight: Any, below: Any, is_random: Any, first: Any, second: Any
) -> Any:
    """Fill ``codes`` (numel,) uint8 with sign and power of two of the values, less ``below``."""
    decoded = np.empty(TILE, np.float32)
    for start in range(0, values.size, TILE):
        source, target = bits[start : start + TILE], codes[start : start + TILE]
        if is_random:
            for i in range(source.size):
                target[i] = _natural(source[i], _dither(True, first, second, start + i), below)
        else:
            for i in range(source.size):
                target[i] = _natural(source[i], _dither(False, first, second, i), below)
        if rest.size:
            for i in range(source.size):
                decoded[i] = _of_natural(target[i], below)
            leave(rest[start : start + TILE], values[start : start + TILE], decoded, weight)


@jitted
def decode_natural(belows: Any, wires: Any, skip: Any, out: Any, divisor: Any) -> Any:
    """Fill ``out`` with the sum over R rows of what ``wires`` (R, bytes) hold from byte ``skip`` on, divided."""
    for start in range(0, out.size, TILE):
        target = out[start : start + TILE]
        for row in range(wires.shape[0]):
            source, below = wires[row, skip + start :], belows[row]
            if row == 0:
                for i in range(target.size):
                    target[i] = _of_natural(source[i], below)
            else:
                for i in range(target.size):
                    target[i] += _of_natural(source[i], below)
        divide(target, divisor)
