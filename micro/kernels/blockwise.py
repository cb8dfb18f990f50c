"""Compiled codes of values that share a scale with the others of their block: int8, QSGD, TernGrad.

Blocks are coded in groups: those fill whole bytes whatever a code's width is, and are as short as blocks allow.
``place`` says where the values lie in their message, at a multiple of the group; `micro.kernels.casts` says what
``grad`` and ``rest`` are, and what is returned. ``header``, bytes at any address, holds the scales of all blocks,
``packed`` all codes.
"""

import math
from typing import Any

import numpy as np

from micro.kernels.jit import as_bits, as_float, get32, jitted, put32
from micro.kernels.noise import uniform
from micro.kernels.packing import pack_codes, pack_ternary, unpack_codes, unpack_ternary
from micro.kernels.tiles import NEAR, absorb_part, finish, highest_bits, leave, outcome
from micro.kernels.tree_sums import factor, sum_of_products

LARGEST = np.float32(2.0**127)
INFINITE = np.float32(np.inf)
BITS, DIGITS = 8, 5  # codes that fill whole bytes: 8 of any width, or 5 ternary ones
SLACK = 8  # codes beyond the last that unpacking may overwrite


def group_size(block: int, even: int = 1) -> int:
    """Return the number of values that are coded together, a multiple of ``block`` and of ``even``."""
    even = math.lcm(even, block)
    return even * max(1, NEAR // even)


@jitted
def _largest(bits: Any) -> Any:
    """Return the largest magnitude, cut at 2^127; NaN where there is one."""
    largest: Any = as_float(highest_bits(bits))
    return LARGEST if largest > LARGEST else largest


@jitted
def _or_infinite(divisor: Any) -> Any:
    """Return the divisor, infinity in place of 0 and NaN."""
    return np.float32(divisor) if divisor > 0 else INFINITE


@jitted
def cut(level: Any, highest: Any) -> Any:
    """Return the level in -highest to highest."""
    level = level if level < highest else highest
    return level if level > -highest else -highest


@jitted
def put_scale(header: Any, number: Any, scale: Any) -> Any:
    """Write the scale of a block."""
    put32(header, number, np.uint64(np.uint32(as_bits(np.float32(scale)))))


@jitted
def get_scale(header: Any, number: Any) -> Any:
    """Return the scale of a block."""
    return as_float(np.int32(get32(header, number)))


@jitted
def encode_int8(
    values: Any,
    bits: Any,
    grad: Any,
    grad_bits: Any,
    rest: Any,
    weight: Any,
    place: Any,
    header: Any,
    packed: Any,
    block: Any,
    group: Any,
    is_random: Any,
    a: Any,
    b: Any,
) -> Any:
    """Fill ``header`` and ``packed`` as codec int8 has them."""
    highest, codes = np.float32(127), packed.view(np.int8)
    decoded = np.empty(min(block, values.size), np.float32)
    first_bad = -1
    for first in range(0, values.size, group):
        end = min(first + group, values.size)
        first_bad = absorb_part(values, bits, grad, grad_bits, first, end, first_bad)
        for start in range(first, end, block):
            x = values[start : min(start + block, end)]
            target = codes[place + start : place + start + x.size]
            step = np.float32(_largest(bits[start : start + x.size]) / highest)
            divisor = _or_infinite(step)
            put_scale(header, (place + start) // block, step)
            if is_random:
                base = np.uint32(place + start)
                for i in range(x.size):
                    drawn = np.floor(x[i] / divisor + uniform(a, b, np.uint32(base + np.uint32(i))))
                    target[i] = np.int8(np.int32(cut(drawn, highest)))
            else:
                for i in range(x.size):
                    target[i] = np.int8(np.int32(cut(np.rint(x[i] / divisor), highest)))
            if rest.size or weight:
                for i in range(x.size):
                    decoded[i] = np.float32(target[i]) * step
                leave(rest[start : start + x.size], x, decoded, weight)
    return outcome(bits, first_bad, weight)


@jitted
def encode_levels(
    values: Any,
    bits: Any,
    grad: Any,
    grad_bits: Any,
    rest: Any,
    weight: Any,
    place: Any,
    header: Any,
    packed: Any,
    block: Any,
    group: Any,
    width: Any,
    is_least_squares: Any,
    a: Any,
    b: Any,
) -> Any:
    """Fill ``header`` and ``packed`` as codec qsgd has them."""
    highest = np.float32((1 << (width - 1)) - 1)
    size = min(block, values.size)
    shares, levels, terms = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    codes = np.empty(min(group, values.size), np.int32)
    first_bad = -1
    for first in range(0, values.size, group):
        end = min(first + group, values.size)
        first_bad = absorb_part(values, bits, grad, grad_bits, first, end, first_bad)
        for start in range(first, end, block):
            x = values[start : min(start + block, end)]
            share, level, term = shares[: x.size], levels[: x.size], terms[: x.size]
            largest = _largest(bits[start : start + x.size])
            divisor, base = _or_infinite(largest), np.uint32(place + start)
            target = codes[start - first : start - first + x.size]
            for i in range(x.size):
                share[i] = x[i] / divisor
            scale = np.float32(1)
            if is_least_squares:
                for i in range(x.size):
                    drawn = np.floor(share[i] * highest + uniform(a, b, np.uint32(base + np.uint32(i))))
                    level[i] = cut(drawn, highest)
                    target[i] = np.int32(level[i] + highest)
            else:
                scale = np.float32(np.sqrt(sum_of_products(share, share, term)))
                divisor = _or_infinite(scale)
                for i in range(x.size):
                    drawn = np.floor(share[i] / divisor * highest + uniform(a, b, np.uint32(base + np.uint32(i))))
                    level[i] = cut(drawn, highest)
                    target[i] = np.int32(level[i] + highest)
            worth = factor(share, level, term) if is_least_squares else np.float32(scale / highest)
            scale = np.float32(cut(np.float32(worth * largest), np.float32(LARGEST / highest)))
            put_scale(header, (place + start) // block, scale)
            if rest.size or weight:
                for i in range(x.size):
                    level[i] *= scale
                leave(rest[start : start + x.size], x, level, weight)
        pack_codes(codes[: end - first], width, packed[(place + first) * width // 8 :])
    return outcome(bits, first_bad, weight)


@jitted
def encode_ternary(
    values: Any,
    bits: Any,
    grad: Any,
    grad_bits: Any,
    rest: Any,
    weight: Any,
    place: Any,
    header: Any,
    packed: Any,
    block: Any,
    group: Any,
    clip: Any,
    is_least_squares: Any,
    a: Any,
    b: Any,
) -> Any:
    """Fill ``header`` and ``packed`` as codec terngrad has them; magnitudes are not cut with a ``clip`` of 0."""
    size = min(block, values.size)
    shares, levels, terms = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    codes = np.empty(min(group, values.size), np.int32)
    first_bad = -1
    for first in range(0, values.size, group):
        end = min(first + group, values.size)
        for start in range(first, end, block):
            x = values[start : min(start + block, end)]
            first_bad = absorb_part(values, bits, grad, grad_bits, start, start + x.size, first_bad)
            share, level, term = shares[: x.size], levels[: x.size], terms[: x.size]
            largest = _largest(bits[start : start + x.size])
            divisor, base = _or_infinite(largest), np.uint32(place + start)
            for i in range(x.size):
                share[i] = x[i] / divisor
            if clip > 0:
                mean = np.float32(sum_of_products(share, share, term) / np.float32(x.size))
                limit = np.float32(clip * np.float32(np.sqrt(mean)))
                limit = np.float32(1) if limit > np.float32(1) else limit
            else:
                limit = as_float(highest_bits(share.view(np.int32)))
            divisor = _or_infinite(limit)
            target = codes[start - first : start - first + x.size]
            for i in range(x.size):
                is_drawn = np.int32(abs(share[i] / divisor) > uniform(a, b, np.uint32(base + np.uint32(i))))
                code = np.int32(is_drawn * np.int32(np.int32(share[i] > 0) - np.int32(share[i] < 0)))
                target[i] = np.int32(code + np.int32(1))
                level[i] = np.float32(code)
            worth = factor(share, level, term) if is_least_squares else limit
            scale = np.float32(cut(np.float32(worth * largest), LARGEST))
            put_scale(header, (place + start) // block, scale)
            if rest.size or weight:
                for i in range(x.size):
                    level[i] *= scale
                leave(rest[start : start + x.size], x, level, weight)
        pack_ternary(codes[: end - first], packed[(place + first) // 5 :])
    return outcome(bits, first_bad, weight)


@jitted
def _scaled(codes: Any, lowest: Any, scale: Any, out: Any, is_first: Any) -> Any:
    """Make ``out`` the codes plus ``lowest`` times the scale, or add that."""
    if is_first:
        for i in range(out.size):
            out[i] = np.float32(np.int32(np.int32(codes[i]) + lowest)) * scale
    else:
        for i in range(out.size):
            out[i] += np.float32(np.int32(np.int32(codes[i]) + lowest)) * scale


@jitted
def decode_int8(own: Any, place: Any, wires: Any, out: Any, divisor: Any, skip: Any, block: Any, group: Any) -> Any:
    """Fill ``out`` with the sum over R messages (R, bytes) of codes times their block's scale, divided.

    The codes of a message begin at byte ``skip``, int8.
    """
    highest, first_bad = np.int32(0), -1
    for first in range(0, out.size, group):
        end = min(first + group, out.size)
        first_bad = absorb_part(*own, first, end, first_bad)
        for row in range(wires.shape[0]):
            wire = wires[row]
            for start in range(first, end, block):
                target = out[start : min(start + block, end)]
                begin = skip + place + start
                scale = get_scale(wire, (place + start) // block)
                _scaled(wire[begin : begin + target.size].view(np.int8), np.int32(0), scale, target, row == 0)
        highest = max(highest, finish(out[first:end], own[0][first:end], divisor, wires.shape[0] == 0))
    return np.int64(first_bad) if own[0].size else np.int64(highest)


@jitted
def decode_levels(
    own: Any, place: Any, wires: Any, out: Any, divisor: Any, skip: Any, block: Any, group: Any, width: Any
) -> Any:
    """Fill ``out`` as `decode_int8` does, with codes of ``width`` bits."""
    highest, first_bad, lowest = np.int32(0), -1, np.int32(1 - (1 << (width - 1)))
    codes = np.empty(min(group, out.size), np.int32)
    for first in range(0, out.size, group):
        end = min(first + group, out.size)
        first_bad = absorb_part(*own, first, end, first_bad)
        for row in range(wires.shape[0]):
            wire = wires[row]
            unpack_codes(wire[skip + (place + first) * width // 8 :], width, codes[: end - first])
            for start in range(first, end, block):
                target = out[start : min(start + block, end)]
                scale = get_scale(wire, (place + start) // block)
                _scaled(codes[start - first :], lowest, scale, target, row == 0)
        highest = max(highest, finish(out[first:end], own[0][first:end], divisor, wires.shape[0] == 0))
    return np.int64(first_bad) if own[0].size else np.int64(highest)


@jitted
def decode_ternary(own: Any, place: Any, wires: Any, out: Any, divisor: Any, skip: Any, block: Any, group: Any) -> Any:
    """Fill ``out`` as `decode_int8` does, with codes -1, 0 and 1, five to a byte."""
    highest, first_bad = np.int32(0), -1
    codes = np.empty(min(group, out.size) + SLACK, np.uint8)
    for first in range(0, out.size, group):
        end = min(first + group, out.size)
        first_bad = absorb_part(*own, first, end, first_bad)
        for row in range(wires.shape[0]):
            wire = wires[row]
            unpack_ternary(wire[skip + (place + first) // 5 :], end - first, codes)
            for start in range(first, end, block):
                target = out[start : min(start + block, end)]
                scale = get_scale(wire, (place + start) // block)
                _scaled(codes[start - first :], np.int32(-1), scale, target, row == 0)
        highest = max(highest, finish(out[first:end], own[0][first:end], divisor, wires.shape[0] == 0))
    return np.int64(first_bad) if own[0].size else np.int64(highest)
