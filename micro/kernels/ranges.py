"""Compiled codes of a float whose range ends at the largest value; see `micro.codecs.range_float`."""

from typing import Any

import numpy as np

from micro.kernels.jit import MAGNITUDE_BITS, as_bits, as_float, jitted
from micro.kernels.packing import pack_codes, unpack_codes
from micro.kernels.tiles import NEAR, absorb_part, finish, highest_bits, leave, outcome
from micro.kernels.tree_sums import TINY, total

SINGLE_MANTISSA = 23
LARGEST_FINITE = 0x7F7FFFFF
HEADER_BYTES = 4
SAMPLE = 4096  # values, about, that tell the best mantissa


@jitted
def look(values: Any, bits: Any, grad: Any, grad_bits: Any) -> Any:
    """Add the gradient; return the place of the first bad sum, and the bit pattern of the largest magnitude."""
    highest, first_bad = np.int32(0), -1
    for start in range(0, values.size, NEAR):
        end = min(start + NEAR, values.size)
        first_bad = absorb_part(values, bits, grad, grad_bits, start, end, first_bad)
        highest = max(highest, highest_bits(bits[start:end]))
    return first_bad, highest


@jitted
def base_of(largest: Any, width: Any, mantissa: Any) -> Any:
    """Return the shortened pattern of the smallest magnitude of the range that ends at the bit pattern ``largest``."""
    shift = np.int64(SINGLE_MANTISSA - mantissa)
    last = min(np.int64(largest) + (np.int64(1) << (shift - 1)), np.int64(LARGEST_FINITE)) >> shift
    return np.int32(max(last - ((1 << (width - 1)) - 2), 1))


@jitted
def _smallest_kept(base: Any, shift: Any) -> Any:
    """Return the bit pattern of half of the smallest magnitude: what is less becomes 0."""
    return as_bits(np.float32(as_float(np.int32(base << shift)) / np.float32(2)))


@jitted
def _code(bits: Any, base: Any, shift: Any, most: Any, least: Any) -> Any:
    """Return the code of a magnitude, 0 to ``most``."""
    pattern = np.int32(bits & np.int32(MAGNITUDE_BITS))
    code = np.int32((pattern + (np.int32(1) << (shift - np.int32(1)))) >> shift) - (base - np.int32(1))
    code = np.int32(min(max(code, np.int32(1)), most))
    return code if pattern >= least else np.int32(0)


@jitted
def _magnitude(code: Any, base: Any, shift: Any) -> Any:
    """Return the bit pattern of what the code of a magnitude stands for."""
    return np.int32((code + base - np.int32(1)) << shift) if code > np.int32(0) else np.int32(0)


@jitted
def best_mantissa(sample: Any, largest: Any, width: Any, fewest: Any) -> Any:
    """Return the mantissa that leaves the smallest relative error of the sample."""
    bits, terms = sample.view(np.int32), np.empty(sample.size, np.float32)
    unit = as_float(np.int32(largest))
    unit = unit if unit > TINY else TINY
    best, least_error, most = np.int32(fewest), np.float32(np.inf), np.int32((1 << (width - 1)) - 1)
    for mantissa in range(fewest, width):
        base, shift = base_of(largest, width, mantissa), np.int32(SINGLE_MANTISSA - mantissa)
        least = _smallest_kept(base, shift)
        for i in range(sample.size):
            kept = as_float(_magnitude(_code(bits[i], base, shift, most, least), base, shift))
            error = np.float32(np.float32(kept - abs(sample[i])) / unit)
            terms[i] = error * error
        error = total(terms)
        if error < least_error:
            best, least_error = np.int32(mantissa), error
    return best


@jitted
def encode(
    values: Any, bits: Any, rest: Any, weight: Any, place: Any, packed: Any, width: Any, base: Any, mantissa: Any
) -> Any:
    """Fill ``packed`` from value ``place`` on with codes of ``width`` bits, the sign as the highest."""
    codes, decoded = np.empty(NEAR, np.int32), np.empty(NEAR, np.float32)
    shift, most = np.int32(SINGLE_MANTISSA - mantissa), np.int32((1 << (width - 1)) - 1)
    least, high = _smallest_kept(base, shift), np.int32(width - 1)
    for start in range(0, values.size, NEAR):
        source = bits[start : start + NEAR]
        size = source.size
        for i in range(size):
            code = _code(source[i], base, shift, most, least)
            is_negative = np.int32((source[i] < np.int32(0)) & ((source[i] & np.int32(MAGNITUDE_BITS)) != np.int32(0)))
            codes[i] = np.int32(code | (is_negative << high))
            decoded[i] = as_float(np.int32(_magnitude(code, base, shift) | (is_negative << np.int32(31))))
        pack_codes(codes[:size], width, packed[(place + start) * width // 8 :])
        if rest.size or weight:
            leave(rest[start : start + NEAR], values[start : start + NEAR], decoded[:size], weight)
    return outcome(bits, -1, weight)


@jitted
def decode(own: Any, place: Any, wires: Any, out: Any, divisor: Any, bases: Any, mantissas: Any, width: Any) -> Any:
    """Fill ``out`` with the sum over R messages (R, bytes) of what they hold from value ``place`` on, divided."""
    codes, most, high = np.empty(NEAR, np.int32), np.int32((1 << (width - 1)) - 1), np.int32(width - 1)
    highest, first_bad = np.int32(0), -1
    for start in range(0, out.size, NEAR):
        target, end = out[start : start + NEAR], min(start + NEAR, out.size)
        first_bad = absorb_part(*own, start, end, first_bad)
        for row in range(wires.shape[0]):
            base, shift = bases[row], np.int32(SINGLE_MANTISSA - mantissas[row])
            unpack_codes(wires[row, HEADER_BYTES + (place + start) * width // 8 :], width, codes[: target.size])
            for i in range(target.size):
                bits = _magnitude(codes[i] & most, base, shift) | ((codes[i] >> high) << np.int32(31))
                value = as_float(np.int32(bits))
                target[i] = value if row == 0 else target[i] + value
        highest = max(highest, finish(target, own[0][start:end], divisor, wires.shape[0] == 0))
    return np.int64(first_bad) if own[0].size else np.int64(highest)
