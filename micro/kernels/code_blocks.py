"""Encode and decode one block of each compiled code: half precision, bfloat16, int8 and levels.

``wire`` is a whole message, with any alignment: the scales of its blocks, then the codes from byte ``skip`` on.
``place``, a multiple of the block, is the index of the first value.
"""

from typing import Any

import numpy as np

from micro.kernels.code import Kind
from micro.kernels.cpu import highest_bits
from micro.kernels.floats import of_bfloat16, of_half, to_bfloat16, to_half
from micro.kernels.jit import as_bits, as_float, get16, get32, jitted, put16, put32
from micro.kernels.packing import pack_codes, unpack_codes

HALF, BFLOAT16, INT8 = map(int, (Kind.HALF, Kind.BFLOAT16, Kind.INT8))
LARGEST = np.float32(2.0**127)
STEPS = np.float32(127)  # of codec int8
TINY = np.float32(2.0**-126)
ONE = np.float32(1)


@jitted
def _put_scale(wire: Any, number: Any, scale: Any) -> Any:
    put32(wire, number, np.uint64(np.uint32(as_bits(np.float32(scale)))))


@jitted
def _get_scale(wire: Any, number: Any) -> Any:
    return as_float(np.int32(get32(wire, number)))


@jitted
def _cut(level: Any, highest: Any) -> Any:
    """Return the level in -highest to highest."""
    level = level if level < highest else highest
    return level if level > -highest else -highest


@jitted
def _total(terms: Any) -> Any:
    """Return the sum of the terms, which are used up, in the order of `micro.codecs.blocks.sums`."""
    count = terms.size
    while count > 1:
        half = 1
        while 2 * half < count:
            half *= 2
        low, high = terms[: count - half], terms[half:count]
        for i in range(low.size):
            low[i] += high[i]
        count = half
    return np.float32(terms[0])


@jitted
def _or_infinite(divisor: Any) -> Any:
    """Return the divisor, infinity in place of 0: of zeros."""
    return divisor if divisor > 0 else np.float32(np.inf)


@jitted
def _largest(bits: Any) -> Any:
    """Return the largest magnitude, cut at 2^127."""
    largest: Any = as_float(highest_bits(bits))
    return LARGEST if largest > LARGEST else largest


@jitted
def _sum_of_products(a: Any, b: Any, terms: Any) -> Any:
    for i in range(a.size):
        terms[i] = a[i] * b[i]
    return _total(terms[: a.size])


@jitted
def _factor(x: Any, levels: Any, terms: Any) -> Any:
    """Return what `micro.codecs.blocks.least_squares` does of a block."""
    squares = _sum_of_products(levels, levels, terms)
    return np.float32(_sum_of_products(x, levels, terms) / (squares if squares > TINY else TINY))


@jitted
def _uniform(words: Any, place: Any) -> Any:
    """Return the number in [0, 1) that `micro.values.randomness.uniform` has at a place."""
    word = np.uint32(np.uint32(place) ^ words[0])
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D))
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(15))) ^ words[1])
    word = np.uint32(word * np.uint32(0x846CA68B))
    word = np.uint32(word ^ (word >> np.uint32(16)))
    return np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24)


@jitted
def _write_int8(x: Any, bits: Any, codes: Any) -> Any:
    """Fill ``codes`` with multiples of a step; return the step."""
    step = np.float32(_largest(bits) / STEPS)
    divisor, target = _or_infinite(step), codes[: x.size].view(np.int8)
    for i in range(x.size):
        target[i] = np.int8(np.int32(_cut(np.rint(x[i] / divisor), STEPS)))
    return step


@jitted
def _write_levels(x: Any, bits: Any, place: Any, code: Any, words: Any, packed: Any, memory: Any) -> Any:
    """Fill ``packed`` as codec qsgd has it; return what a level is worth."""
    width, is_published = code[2], code[3]
    highest, largest = np.float32((1 << (width - 1)) - 1), _largest(bits)
    share, level, terms = memory[0, : x.size], memory[1, : x.size], memory[2]
    codes, divisor = memory[3, : x.size].view(np.int32), _or_infinite(largest)
    for i in range(x.size):
        share[i] = x[i] / divisor
    scale = np.float32(np.sqrt(_sum_of_products(share, share, terms))) if is_published else ONE
    divisor = _or_infinite(scale)
    base = np.uint32(place)
    for i in range(x.size):
        drawn = np.floor(share[i] / divisor * highest + _uniform(words, np.uint32(base + np.uint32(i))))
        level[i] = _cut(drawn, highest)
        codes[i] = np.int32(level[i] + highest)
    pack_codes(codes, width, packed)
    worth = np.float32(scale / highest) if is_published else _factor(share, level, terms)
    return _cut(np.float32(worth * largest), np.float32(LARGEST / highest))


@jitted
def write_block(code: Any, x: Any, bits: Any, wire: Any, place: Any, skip: Any, words: Any, memory: Any) -> Any:
    """Code a block of values, which begins at ``place``; ``memory`` (4, block) is used."""
    kind, number = code[0], place // code[1]
    if kind == HALF:
        codes = wire[2 * place :]
        for i in range(x.size):
            put16(codes, i, np.uint64(to_half(x[i])))
    elif kind == BFLOAT16:
        codes = wire[2 * place :]
        for i in range(x.size):
            put16(codes, i, np.uint64(to_bfloat16(x[i])))
    elif kind == INT8:
        _put_scale(wire, number, _write_int8(x, bits, wire[skip + place :]))
    else:
        packed = wire[skip + place * code[2] // 8 :]
        _put_scale(wire, number, _write_levels(x, bits, place, code, words, packed, memory))


@jitted
def read_block(code: Any, wire: Any, place: Any, skip: Any, out: Any, memory: Any) -> Any:
    """Fill ``out`` with what a block stands for; ``memory`` (block,) int32 is used."""
    kind, number = code[0], place // code[1]
    if kind == HALF:
        codes = wire[2 * place :]
        for i in range(out.size):
            out[i] = of_half(np.int32(get16(codes, i)))
    elif kind == BFLOAT16:
        codes = wire[2 * place :]
        for i in range(out.size):
            out[i] = of_bfloat16(np.int32(get16(codes, i)))
    elif kind == INT8:
        multiples, step = wire[skip + place : skip + place + out.size].view(np.int8), _get_scale(wire, number)
        for i in range(out.size):
            out[i] = np.float32(multiples[i]) * step
    else:
        codes, highest, worth = memory[: out.size], np.int32((1 << (code[2] - 1)) - 1), _get_scale(wire, number)
        unpack_codes(wire[skip + place * code[2] // 8 :], code[2], codes)
        for i in range(out.size):
            out[i] = np.float32(np.int32(codes[i] - highest)) * worth
