"""How a block of each code is written and read: half precision, bfloat16, int8, signs, levels, digits, powers of two.

``wire`` is a whole message at any address: the scales of its blocks, then from byte ``skip`` on the codes. ``place``, a
multiple of the block, says where the values lie in it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from micro.kernels.code import DIGITS, Kind
from micro.kernels.floats import of_bfloat16, of_half, to_bfloat16, to_half
from micro.kernels.jit import MAGNITUDE_BITS, as_bits, as_float, get16, get32, get64, jitted, put16, put32, put64
from micro.kernels.packing import pack_codes, unpack_codes
from micro.kernels.tiles import highest_bits

HALF, BFLOAT16, INT8, SIGN, SIDES, LEVELS, TERNARY, POWERS = map(int, Kind)
LARGEST = np.float32(2.0**127)
STEPS = np.float32(127)  # of codec int8
NUM_POWERS = 127  # of codec natural
TINY = np.float32(2.0**-126)
SIGNS = (np.arange(256)[:, None] // 3 ** np.arange(DIGITS) % 3 - 1).astype(np.float32)  # of the digits of a byte
LANES = 64
ONE = np.float32(1)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _lanes_at(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    source = context.make_array(array_type)(context, builder, array)
    return builder.bitcast(builder.gep(source.data, [start]), _VECTOR.as_pointer())


def _negative_lanes(typingctx: Any, values: Any, start: Any) -> Any:
    """Return a word whose bit i tells whether the value at ``start + i`` is negative."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        loaded = builder.load(_lanes_at(context, builder, sig.args[0], *args))
        loaded.align = 4
        negative = builder.fcmp_ordered("<", loaded, ir.Constant(_VECTOR, [0.0] * LANES))
        return builder.bitcast(negative, ir.IntType(LANES))

    return types.uint64(values, types.int64), codegen


def _spread_lanes(typingctx: Any, out: Any, start: Any, word: Any, upper: Any, lower: Any) -> Any:
    """Write LANES numbers from ``start`` on: the lower where a bit of the word is set, else the upper."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = _lanes_at(context, builder, sig.args[0], args[0], args[1])
        empty, lanes = ir.Constant(_VECTOR, ir.Undefined), ir.VectorType(ir.IntType(32), LANES)
        uppers, lowers = (
            builder.shuffle_vector(
                builder.insert_element(empty, number, ir.Constant(ir.IntType(32), 0)), empty, ir.Constant(lanes, None)
            )
            for number in args[3:]
        )
        is_lower = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), LANES))
        builder.store(builder.select(is_lower, lowers, uppers), place).align = 4
        return context.get_dummy_value()

    return types.void(out, types.int64, types.uint64, types.float32, types.float32), codegen


_negative: Any = intrinsic(_negative_lanes)
_put_lanes: Any = intrinsic(_spread_lanes)


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
def _random_bits(words: Any, place: Any) -> Any:
    """Return the 32 random bits of a place that `micro.values.randomness.bits` has."""
    word = np.uint32(np.uint32(place) ^ words[0])
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D))
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(15))) ^ words[1])
    word = np.uint32(word * np.uint32(0x846CA68B))
    return np.uint32(word ^ (word >> np.uint32(16)))


@jitted
def _uniform(words: Any, place: Any) -> Any:
    return np.float32(np.int32(_random_bits(words, place) >> np.uint32(8))) * np.float32(2.0**-24)


@jitted
def _write_int8(x: Any, bits: Any, codes: Any) -> Any:
    """Fill ``codes`` with multiples of a step; return the step."""
    step = np.float32(_largest(bits) / STEPS)
    divisor, target = _or_infinite(step), codes[: x.size].view(np.int8)
    for i in range(x.size):
        target[i] = np.int8(np.int32(_cut(np.rint(x[i] / divisor), STEPS)))
    return step


@jitted
def _write_signs(x: Any, codes: Any) -> Any:
    """Fill ``codes`` with a bit for each value, 1 where it is negative."""
    whole = x.size // LANES
    for i in range(whole):
        put64(codes, i, _negative(x, LANES * i))
    for start in range(LANES * whole, x.size, 8):
        byte = np.uint8(0)
        for i in range(start, min(start + 8, x.size)):
            byte |= np.uint8(np.int32(x[i] < 0) << np.int32(i - start))
        codes[start // 8] = byte


@jitted
def _mean_magnitude(x: Any, terms: Any) -> Any:
    count = np.float32(x.size)
    for i in range(x.size):
        terms[i] = abs(x[i] / count)
    return _cut(_total(terms[: x.size]), LARGEST)


@jitted
def _mean_of_side(x: Any, is_negative: Any, terms: Any) -> Any:
    """Return the mean of the values on a side of zero; 0 where none is."""
    count = np.int32(0)
    for i in range(x.size):
        count += np.int32((x[i] < 0) == is_negative)
    divisor = np.float32(max(count, np.int32(1)))
    for i in range(x.size):
        terms[i] = x[i] / divisor if (x[i] < 0) == is_negative else np.float32(0)
    return _cut(_total(terms[: x.size]), LARGEST)


@jitted
def _write_levels(x: Any, bits: Any, place: Any, code: Any, words: Any, packed: Any, memory: Any) -> Any:
    """Fill ``packed`` as codec qsgd has it; return what a level is worth."""
    width, is_published = code[2], code[4]
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
def _put_some_digits(codes: Any, first: Any, byte: Any) -> Any:
    """Return a byte with what there is of five codes from ``first`` on, which may be negative, added."""
    weight = np.int32(1)
    for i in range(first, min(first + DIGITS, codes.size)):
        byte += codes[max(i, 0)] * weight if i >= 0 else np.int32(0)
        weight *= np.int32(3)
    return byte


@jitted
def _put_digits(codes: Any, place: Any, packed: Any) -> Any:
    """Write codes, 0 to 2, from ``place`` on, five to a byte, the first as the lowest digit."""
    head, last = -(place % DIGITS), (place + codes.size) // DIGITS  # of the first byte, and the number of the last
    if head:
        packed[place // DIGITS] = _put_some_digits(codes, head, np.int32(packed[place // DIGITS]))
    first = place // DIGITS + (head < 0)
    offset = first * DIGITS - place
    whole, near = packed[first : max(first, last)], codes[offset:]
    for i in range(whole.size):
        low = near[5 * i] + np.int32(3) * near[5 * i + 1] + np.int32(9) * near[5 * i + 2]
        whole[i] = low + np.int32(27) * near[5 * i + 3] + np.int32(81) * near[5 * i + 4]
    if last >= first and offset + DIGITS * whole.size < codes.size:
        packed[last] = _put_some_digits(codes, offset + DIGITS * whole.size, np.int32(0))


@jitted
def _write_ternary(x: Any, bits: Any, place: Any, code: Any, words: Any, packed: Any, memory: Any) -> Any:
    """Fill ``packed``, the codes of the whole message, as codec terngrad has it; return what a code is worth."""
    clip, is_published, largest = code[3], code[4], _largest(bits)
    share, level, terms = memory[0, : x.size], memory[1, : x.size], memory[2]
    divisor = _or_infinite(largest)
    for i in range(x.size):
        share[i] = x[i] / divisor
    if clip > 0:
        mean = np.float32(_sum_of_products(share, share, terms) / np.float32(x.size))
        limit = np.float32(clip * np.float32(np.sqrt(mean)))
        limit = limit if limit < ONE else ONE
    else:
        limit = as_float(highest_bits(share.view(np.int32)))
    divisor = _or_infinite(limit)
    codes, base = memory[3, : x.size].view(np.int32), np.uint32(place)
    for i in range(x.size):
        is_drawn = np.int32(abs(share[i] / divisor) > _uniform(words, np.uint32(base + np.uint32(i))))
        code = np.int32(is_drawn * np.int32(np.int32(share[i] > 0) - np.int32(share[i] < 0)))
        level[i], codes[i] = np.float32(code), np.int32(code + np.int32(1))
    _put_digits(codes, place, packed)
    worth = limit if is_published else _factor(share, level, terms)
    return _cut(np.float32(worth * largest), LARGEST)


@jitted
def _exponent(bits: Any, code: Any, words: Any, place: Any) -> Any:
    """Return the exponent's field of a number after rounding, as codec natural has it."""
    dither = np.int32(_random_bits(words, place) >> np.uint32(9)) if code[4] else np.int32(1 << 22)
    return min(np.int32(np.int32(np.int32(bits & np.int32(MAGNITUDE_BITS)) + dither) >> np.int32(23)), np.int32(254))


@jitted
def highest_exponent(code: Any, bits: Any, place: Any, words: Any) -> Any:
    """Return the highest exponent's field of the numbers from ``place`` on, after rounding."""
    highest, key, base = np.int32(0), (words[0], words[1]), np.uint32(place)
    for i in range(bits.size):
        highest = max(highest, _exponent(bits[i], code, key, np.uint32(base + np.uint32(i))))
    return highest


@jitted
def put_header(wire: Any, highest: Any) -> Any:
    """Begin a message of powers, the highest of which is given."""
    put32(wire, 0, np.uint64(max(highest - NUM_POWERS, 0)))


@jitted
def _write_powers(bits: Any, place: Any, code: Any, words: Any, below: Any, codes: Any) -> Any:
    base = np.uint32(place)
    for i in range(bits.size):
        exponent = _exponent(bits[i], code, words, np.uint32(base + np.uint32(i)))
        power = max(np.int32(exponent - below), np.int32(0))
        is_negative = np.int32((bits[i] < np.int32(0)) & ((bits[i] & np.int32(MAGNITUDE_BITS)) != np.int32(0)))
        codes[i] = np.uint8(np.int32(power | (is_negative << np.int32(7))))


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
    elif kind == LEVELS:
        packed = wire[skip + place * code[2] // 8 :]
        _put_scale(wire, number, _write_levels(x, bits, place, code, words, packed, memory))
    elif kind == TERNARY:
        _put_scale(wire, number, _write_ternary(x, bits, place, code, words, wire[skip:], memory))
    elif kind == POWERS:
        _write_powers(bits, place, code, words, np.int32(get32(wire, 0)), wire[skip + place :])
    else:
        _write_signs(x, wire[skip + place // 8 :])
        if kind == SIGN:
            _put_scale(wire, number, _mean_magnitude(x, memory[0]))
        else:
            _put_scale(wire, number, _mean_of_side(x, False, memory[0]))
            _put_scale(wire, skip // 8 + number, _mean_of_side(x, True, memory[0]))


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
    elif kind == LEVELS:
        codes, highest, worth = memory[: out.size], np.int32((1 << (code[2] - 1)) - 1), _get_scale(wire, number)
        unpack_codes(wire[skip + place * code[2] // 8 :], code[2], codes)
        for i in range(out.size):
            out[i] = np.float32(np.int32(codes[i] - highest)) * worth
    elif kind == TERNARY:
        _read_ternary(wire[skip:], place, _get_scale(wire, number), out)
    elif kind == POWERS:
        codes, below = wire[skip + place :], np.int32(get32(wire, 0))
        for i in range(out.size):
            power = np.int32(codes[i] & np.uint8(NUM_POWERS))
            pattern = np.int32(np.int32(power + below) << np.int32(23)) if power > 0 else np.int32(0)
            out[i] = as_float(np.int32(pattern | np.int32(np.int32(codes[i] >> np.uint8(7)) << np.int32(31))))
    else:
        upper = _get_scale(wire, number)
        lower = np.float32(-upper) if kind == SIGN else _get_scale(wire, skip // 8 + number)
        _read_signs(wire[skip + place // 8 :], upper, lower, out)


@jitted
def _read_ternary(packed: Any, place: Any, worth: Any, out: Any) -> Any:
    number, first = place // DIGITS, -(place % DIGITS)
    while first < out.size:
        codes = SIGNS[packed[number]]
        if first >= 0 and first + DIGITS <= out.size:
            for digit in range(DIGITS):
                out[first + digit] = codes[digit] * worth
        else:
            for i in range(max(first, 0), min(first + DIGITS, out.size)):
                out[i] = codes[i - first] * worth
        number, first = number + 1, first + DIGITS


@jitted
def _read_signs(codes: Any, upper: Any, lower: Any, out: Any) -> Any:
    whole = out.size // LANES
    for i in range(whole):
        _put_lanes(out, LANES * i, get64(codes, i), upper, lower)
    for i in range(LANES * whole, out.size):
        out[i] = lower if (codes[i // 8] >> np.uint8(i % 8)) & np.uint8(1) else upper
