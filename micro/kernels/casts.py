"""Compiled codes of which each is made of one value alone: half precision, bfloat16, powers of two.

Wires are bytes at any address. ``grad``, where it is not empty, is added to the values first, as `absorb_tile` does;
the loop returns the place of the first sum that is too large, or -1. ``rest`` is what a code leaves of its values: it
becomes ``values - decoded``; an empty one is left alone. With a ``weight`` other than zero it becomes that many times
it, the values become what is decoded, and the bit pattern of its largest magnitude is returned. Decoding returns that
of the sum; given values of its ``own``, and their gradient, each as numbers and as bits, it adds them and returns the
place as encoding does.
"""

from typing import Any

import numpy as np

from micro.kernels.floats import of_bfloat16, of_half, to_bfloat16, to_half
from micro.kernels.jit import MAGNITUDE_BITS, as_float, get16, jitted, put16
from micro.kernels.noise import noise
from micro.kernels.tiles import NEAR, absorb_part, finish, highest_bits, leave, outcome

MANTISSA = 23
NUM_POWERS = 127
HIGHEST = 254  # the exponent field of 2**127
HEADER_BYTES = 4
HALF_WAY = 1 << (MANTISSA - 1)


@jitted
def encode_cast(
    values: Any, bits: Any, grad: Any, grad_bits: Any, rest: Any, weight: Any, place: Any, wire: Any, is_half: Any
) -> Any:
    """Fill ``wire`` from value ``place`` on with the values in 16 bits each."""
    decoded = np.empty(min(NEAR, values.size), np.float32)
    first_bad = -1
    for start in range(0, values.size, NEAR):
        end = min(start + NEAR, values.size)
        first_bad = absorb_part(values, bits, grad, grad_bits, start, end, first_bad)
        source, codes = values[start:end], wire[2 * (place + start) : 2 * (place + end)]
        if is_half:
            for i in range(source.size):
                code = to_half(source[i])
                put16(codes, i, np.uint64(code))
                decoded[i] = of_half(code)
        else:
            for i in range(source.size):
                code = to_bfloat16(source[i])
                put16(codes, i, np.uint64(code))
                decoded[i] = of_bfloat16(code)
        if rest.size or weight:
            leave(rest[start:end], source, decoded, weight)
    return outcome(bits, first_bad, weight)


@jitted
def decode_cast(own: Any, place: Any, wires: Any, out: Any, divisor: Any, is_half: Any) -> Any:
    """Fill ``out`` with the sum over ``wires`` (R, bytes) of what they hold from value ``place`` on, divided."""
    highest, first_bad = np.int32(0), -1
    for start in range(0, out.size, NEAR):
        target, end = out[start : start + NEAR], min(start + NEAR, out.size)
        first_bad = absorb_part(*own, start, end, first_bad)
        for row in range(wires.shape[0]):
            codes = wires[row, 2 * (place + start) :]
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
        highest = max(highest, finish(target, own[0][start:end], divisor, wires.shape[0] == 0))
    return np.int64(first_bad) if own[0].size else np.int64(highest)


@jitted
def _power(bits: Any, dither: Any) -> Any:
    """Return the exponent field of a magnitude after what ``dither`` (int32) carries into it."""
    exponent = np.int32((bits & np.int32(MAGNITUDE_BITS)) + dither) >> np.int32(MANTISSA)
    return min(np.int32(exponent), np.int32(HIGHEST))


@jitted
def _dither(first: Any, second: Any, base: Any, i: Any) -> Any:
    """Return a random mantissa."""
    return np.int32(noise(first, second, np.uint32(base + np.uint32(i))) >> np.uint32(9))


@jitted
def highest_power(
    values: Any, bits: Any, grad: Any, grad_bits: Any, place: Any, is_random: Any, first: Any, second: Any
) -> Any:
    """Add the gradient; return the place of the first bad sum, and the largest exponent field after rounding."""
    highest, first_bad = np.int32(0), -1
    for start in range(0, values.size, NEAR):
        end = min(start + NEAR, values.size)
        first_bad = absorb_part(values, bits, grad, grad_bits, start, end, first_bad)
        source = bits[start:end]
        if is_random:
            base = np.uint32(place + start)
            for i in range(source.size):
                highest = max(highest, _power(source[i], _dither(first, second, base, i)))
        else:
            highest = max(highest, _power(highest_bits(source), np.int32(HALF_WAY)))  # it never falls
    return first_bad, highest


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
    values: Any,
    bits: Any,
    rest: Any,
    weight: Any,
    place: Any,
    codes: Any,
    below: Any,
    is_random: Any,
    first: Any,
    second: Any,
) -> Any:
    """Fill ``codes`` from ``place`` on with sign and power of two of the values, less ``below``."""
    decoded = np.empty(min(NEAR, values.size), np.float32)
    for start in range(0, values.size, NEAR):
        source = bits[start : start + NEAR]
        target = codes[place + start : place + start + source.size]
        if is_random:
            base = np.uint32(place + start)
            for i in range(source.size):
                target[i] = _natural(source[i], _dither(first, second, base, i), below)
        else:
            for i in range(source.size):
                target[i] = _natural(source[i], np.int32(HALF_WAY), below)
        if rest.size or weight:
            for i in range(source.size):
                decoded[i] = _of_natural(target[i], below)
            leave(rest[start : start + NEAR], values[start : start + NEAR], decoded, weight)
    return outcome(bits, -1, weight)


@jitted
def decode_natural(own: Any, place: Any, wires: Any, out: Any, divisor: Any, belows: Any) -> Any:
    """Fill ``out`` with the sum over R rows of what ``wires`` (R, bytes) hold from value ``place`` on, divided."""
    highest, first_bad = np.int32(0), -1
    for start in range(0, out.size, NEAR):
        target, end = out[start : start + NEAR], min(start + NEAR, out.size)
        first_bad = absorb_part(*own, start, end, first_bad)
        for row in range(wires.shape[0]):
            source, below = wires[row, HEADER_BYTES + place + start :], belows[row]
            if row == 0:
                for i in range(target.size):
                    target[i] = _of_natural(source[i], below)
            else:
                for i in range(target.size):
                    target[i] += _of_natural(source[i], below)
        highest = max(highest, finish(target, own[0][start:end], divisor, wires.shape[0] == 0))
    return np.int64(first_bad) if own[0].size else np.int64(highest)
