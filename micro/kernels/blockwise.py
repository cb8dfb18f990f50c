"""Compiled codes of values that share a scale with the others of their block; see `micro.kernels.casts` for ``rest``.

Blocks are coded in groups: those fill whole bytes whatever a code's width is, and stay in the nearest caches.
"""

import math
from typing import Any

import numpy as np

from micro.kernels.casts import divide, leave
from micro.kernels.jit import MAGNITUDE_BITS, as_float, jitted
from micro.kernels.noise import uniform
from micro.kernels.packing import pack_codes, pack_ternary, unpack_codes, unpack_ternary

LARGEST = np.float32(2.0**127)
TINY = np.float32(2.0**-126)
INFINITE = np.float32(np.inf)
TERNARY = 0  # in place of a width
EVEN = 40  # codes that fill whole bytes: 8 of any width, or 5 ternary ones
NEAR = 4096  # codes that stay in the nearest cache


def group_size(block: int) -> int:
    """Return the number of values that are coded together, a multiple of ``block``."""
    even = math.lcm(EVEN, block)
    return even * max(1, NEAR // even)


@jitted
def _largest(bits: Any) -> Any:
    """Return the largest magnitude, cut at 2^127; NaN where there is one."""
    highest = np.int32(0)
    for i in range(bits.size):
        highest = max(highest, bits[i] & np.int32(MAGNITUDE_BITS))
    largest: Any = as_float(np.int32(highest))
    return LARGEST if largest > LARGEST else largest


@jitted
def _or_infinite(divisor: Any) -> Any:
    """Return the divisor, infinity in place of 0 and NaN."""
    return divisor if divisor > 0 else INFINITE


@jitted
def _cut(level: Any, highest: Any) -> Any:
    """Return the level in -highest to highest."""
    level = level if level < highest else highest
    return level if level > -highest else -highest


@jitted
def _sum(terms: Any) -> Any:
    """Return the sum in the order of micro.codecs.blocks.sums; the terms are used up."""
    count = terms.size
    half = 1
    while 2 * half < count:
        half *= 2
    for i in range(count - half):
        terms[i] += terms[i + half]
    half //= 2
    while half:
        low, high = terms[:half], terms[half : 2 * half]
        for i in range(half):
            low[i] += high[i]
        half //= 2
    return terms[0]


@jitted
def _sum_of_squares(x: Any, terms: Any) -> Any:
    for i in range(x.size):
        terms[i] = x[i] * x[i]
    return _sum(terms)


@jitted
def _factor(shares: Any, levels: Any, terms: Any) -> Any:
    """Return <shares, levels> / <levels, levels>, or 0; see micro.codecs.blocks.least_squares."""
    for i in range(shares.size):
        terms[i] = shares[i] * levels[i]
    inner = _sum(terms)
    squares = _sum_of_squares(levels, terms)
    return inner / (squares if squares > TINY else TINY)


@jitted
def encode_int8(
    values: Any, bits: Any, scales: Any, codes: Any, rest: Any, weight: Any, block: Any, is_random: Any, a: Any, b: Any
) -> Any:
    """Fill ``scales`` and ``codes`` (numel,) int8 as codec int8 has them."""
    highest = np.float32(127)
    decoded = np.empty(min(block, values.size), np.float32)
    for number in range(scales.size):
        start = number * block
        x, target = values[start : start + block], codes[start : start + block]
        step = np.float32(_largest(bits[start : start + block]) / highest)
        divisor = np.float32(_or_infinite(step))
        scales[number] = step
        if is_random:
            for i in range(x.size):
                decoded[i] = np.floor(x[i] / divisor + uniform(a, b, start + i))
        else:
            for i in range(x.size):
                decoded[i] = np.rint(x[i] / divisor)
        for i in range(x.size):
            target[i] = np.int8(np.int32(_cut(decoded[i], highest)))
        if rest.size:
            for i in range(x.size):
                decoded[i] = np.float32(target[i]) * step
            leave(rest[start : start + block], x, decoded, weight)


@jitted
def encode_levels(
    values: Any,
    bits: Any,
    scales: Any,
    packed: Any,
    rest: Any,
    weight: Any,
    block: Any,
    group: Any,
    width: Any,
    is_least_squares: Any,
    a: Any,
    b: Any,
) -> Any:
    """Fill ``scales`` and ``packed`` as codec qsgd has them."""
    highest = np.float32((1 << (width - 1)) - 1)
    size = min(block, values.size)
    shares, levels, terms = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    codes = np.empty(min(group, values.size), np.int32)
    for first in range(0, values.size, group):
        end = min(first + group, values.size)
        for start in range(first, end, block):
            x = values[start : start + block]
            share, level, term = shares[: x.size], levels[: x.size], terms[: x.size]
            largest = _largest(bits[start : start + block])
            divisor = np.float32(_or_infinite(largest))
            for i in range(x.size):
                share[i] = x[i] / divisor
            scale = np.float32(1) if is_least_squares else np.float32(np.sqrt(_sum_of_squares(share, term)))
            divisor = np.float32(_or_infinite(scale))
            for i in range(x.size):
                drawn = np.floor(share[i] / divisor * highest + uniform(a, b, start + i))
                level[i] = _cut(drawn, highest)
            worth = _factor(share, level, term) if is_least_squares else np.float32(scale / highest)
            scale = np.float32(_cut(np.float32(worth * largest), np.float32(LARGEST / highest)))
            scales[start // block] = scale
            target = codes[start - first : end - first]
            for i in range(x.size):
                target[i] = np.int32(level[i] + highest)
            if rest.size:
                for i in range(x.size):
                    level[i] *= scale
                leave(rest[start : start + block], x, level, weight)
        pack_codes(codes[: end - first], width, packed[first * width // 8 :])


@jitted
def encode_ternary(
    values: Any,
    bits: Any,
    scales: Any,
    packed: Any,
    rest: Any,
    weight: Any,
    block: Any,
    group: Any,
    clip: Any,
    is_least_squares: Any,
    a: Any,
    b: Any,
) -> Any:
    """Fill ``scales`` and ``packed`` as codec terngrad has them; magnitudes are not cut with a ``clip`` of 0."""
    size = min(block, values.size)
    shares, levels, terms = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    codes = np.empty(min(group, values.size), np.int32)
    for first in range(0, values.size, group):
        end = min(first + group, values.size)
        for start in range(first, end, block):
            x = values[start : start + block]
            share, level, term = shares[: x.size], levels[: x.size], terms[: x.size]
            largest = _largest(bits[start : start + block])
            divisor = np.float32(_or_infinite(largest))
            limit = np.float32(0)
            for i in range(x.size):
                share[i] = x[i] / divisor
            if clip > 0:
                mean = np.float32(_sum_of_squares(share, term) / np.float32(x.size))
                limit = np.float32(clip * np.float32(np.sqrt(mean)))
                limit = np.float32(1) if limit > np.float32(1) else limit
            else:
                for i in range(x.size):
                    limit = max(limit, abs(share[i]))
            divisor = np.float32(_or_infinite(limit))
            for i in range(x.size):
                sign = np.float32(share[i] > 0) - np.float32(share[i] < 0)
                level[i] = sign if abs(share[i] / divisor) > uniform(a, b, start + i) else np.float32(0)
            worth = np.float32(_factor(share, level, term)) if is_least_squares else limit
            scale = np.float32(_cut(np.float32(worth * largest), LARGEST))
            scales[start // block] = scale
            target = codes[start - first : end - first]
            for i in range(x.size):
                target[i] = np.int32(level[i]) + np.int32(1)
            if rest.size:
                for i in range(x.size):
                    level[i] *= scale
                leave(rest[start : start + block], x, level, weight)
        pack_ternary(codes[: end - first], packed[first // 5 :])


@jitted
def encode_signs(
    values: Any, scales: Any, packed: Any, rest: Any, weight: Any, block: Any, group: Any, has_two: Any
) -> Any:
    """Fill ``scales`` and ``packed`` as codec sign, or onebit, has them: rows of upper means, and of lower ones."""
    terms = np.empty(min(block, values.size), np.float32)
    codes = np.empty(min(group, values.size), np.int32)
    for first in range(0, values.size, group):
        end = min(first + group, values.size)
        for start in range(first, end, block):
            x, term = values[start : start + block], terms[: min(block, values.size - start)]
            code = codes[start - first : start - first + x.size]
            num_negative = np.int32(0)
            for i in range(x.size):
                negative = np.int32(x[i] < 0)
                code[i] = negative
                num_negative += negative
            if has_two:
                count = np.float32(x.size - num_negative) if num_negative < x.size else np.float32(1)
                for i in range(x.size):
                    term[i] = np.float32(0) / count if code[i] else x[i] / count
                upper = _cut(_sum(term), LARGEST)
                count = np.float32(num_negative) if num_negative > 0 else np.float32(1)
                for i in range(x.size):
                    term[i] = x[i] / count if code[i] else np.float32(0)
                lower = _cut(_sum(term), LARGEST)
                scales[1, start // block] = lower
            else:
                count = np.float32(x.size)
                for i in range(x.size):
                    term[i] = abs(x[i] / count)
                upper = _cut(_sum(term), LARGEST)
                lower = -upper
            scales[0, start // block] = upper
            if rest.size:
                for i in range(x.size):
                    term[i] = lower if code[i] else upper
                leave(rest[start : start + block], x, term, weight)
        pack_codes(codes[: end - first], 1, packed[first // 8 :])


@jitted
def decode_levels(
    scales: Any, wires: Any, skip: Any, out: Any, divisor: Any, block: Any, group: Any, width: Any, lowest: Any
) -> Any:
    """Fill ``out`` with the sum over R rows of (code + lowest) times its block's scale, divided.

    ``wires`` (R, bytes) hold codes of ``width`` bits from byte ``skip`` on; ``scales`` (R, blocks).
    """
    codes = np.empty(min(group, out.size), np.int32)
    for first in range(0, out.size, group):
        end = min(first + group, out.size)
        code = codes[: end - first]
        for row in range(wires.shape[0]):
            if width == TERNARY:
                unpack_ternary(wires[row, skip + first // 5 :], code)
            else:
                unpack_codes(wires[row, skip + first * width // 8 :], width, code)
            for start in range(first, end, block):
                target, source = out[start : min(start + block, end)], code[start - first :]
                scale = scales[row, start // block]
                if row == 0:
                    for i in range(target.size):
                        target[i] = np.float32(source[i] + lowest) * scale
                else:
                    for i in range(target.size):
                        target[i] += np.float32(source[i] + lowest) * scale
        divide(out[first:end], divisor)


@jitted
def decode_int8(scales: Any, codes: Any, skip: Any, out: Any, divisor: Any, block: Any) -> Any:
    """Fill ``out`` with the sum over R rows of int8 ``codes`` (R, bytes) times their block's scale, divided."""
    for start in range(0, out.size, block):
        target = out[start : start + block]
        for row in range(codes.shape[0]):
            source, scale = codes[row, skip + start :], scales[row, start // block]
            if row == 0:
                for i in range(target.size):
                    target[i] = np.float32(source[i]) * scale
            else:
                for i in range(target.size):
                    target[i] += np.float32(source[i]) * scale
        divide(target, divisor)


@jitted
def decode_signs(
    uppers: Any, lowers: Any, wires: Any, skip: Any, out: Any, divisor: Any, block: Any, group: Any
) -> Any:
    """Fill ``out`` with the sum over R rows of a block's lower mean where a bit is set, else the upper, divided."""
    codes = np.empty(min(group, out.size), np.int32)
    for first in range(0, out.size, group):
        end = min(first + group, out.size)
        code = codes[: end - first]
        for row in range(wires.shape[0]):
            unpack_codes(wires[row, skip + first // 8 :], 1, code)
            for start in range(first, end, block):
                target, source = out[start : min(start + block, end)], code[start - first :]
                upper, lower = uppers[row, start // block], lowers[row, start // block]
                if row == 0:
                    for i in range(target.size):
                        target[i] = lower if source[i] else upper
                else:
                    for i in range(target.size):
                        target[i] += lower if source[i] else upper
        divide(out[first:end], divisor)
