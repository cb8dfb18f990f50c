"""Compiled packing of ascending places: low bits side by side, high parts as bits of a map; see `micro.bits`."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from micro.kernels.jit import get64, jitted, lowest_bit, lowest_bit_or_64, num_bits, put64
from micro.kernels.packing import pack_codes, unpack_codes

TILE = 1 << 12  # places that stay in the nearest cache; their low bits fill whole bytes
WINDOW = 1 << 13  # bits of the map that are set at a time
WORD = 64
BITS = 8
FEW = 6  # bits of a word
MOST_APART = 12  # places of a map for each bit that is set, so that 8 of these lie within two words mostly


def _bits_of_bytes() -> np.ndarray:
    """Return (256, 8) uint8: which bits of a byte are set, ascending, then zeros."""
    rows = [[bit for bit in range(BITS) if byte >> bit & 1] for byte in range(256)]
    return np.array([row + [0] * (BITS - len(row)) for row in rows], np.uint8)


BITS_OF = _bits_of_bytes()


def _put_bits(typingctx: Any, places: Any, found: Any, table: Any, byte: Any, base: Any) -> Any:
    """Write 8 int32 from place ``found`` on: row ``byte`` of the table plus ``base``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        narrow, wide = ir.VectorType(ir.IntType(8), BITS), ir.VectorType(ir.IntType(32), BITS)
        rows = context.make_array(sig.args[2])(context, builder, args[2])
        row = builder.load(builder.gep(builder.bitcast(rows.data, narrow.as_pointer()), [args[3]]))
        row.align = 1
        empty = ir.Constant(wide, ir.Undefined)
        first = builder.insert_element(empty, args[4], ir.Constant(ir.IntType(32), 0))
        bases = builder.shuffle_vector(first, empty, ir.Constant(wide, None))
        target = context.make_array(sig.args[0])(context, builder, args[0])
        place = builder.bitcast(builder.gep(target.data, [args[1]]), wide.as_pointer())
        builder.store(builder.add(builder.zext(row, wide), bases), place).align = 4
        return context.get_dummy_value()

    return types.void(places, types.int64, table, types.int64, types.int32), codegen


_put_found: Any = intrinsic(_put_bits)


def _set_flags(typingctx: Any, flags: Any, number: Any) -> Any:
    """Return a word whose bit i tells whether flag ``64 * number + i`` is set, and clear these flags."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = ir.VectorType(ir.IntType(8), WORD)
        source = context.make_array(sig.args[0])(context, builder, args[0])
        place = builder.gep(builder.bitcast(source.data, lanes.as_pointer()), [args[1]])
        loaded = builder.load(place)
        loaded.align = 1
        zero = ir.Constant(lanes, [0] * WORD)
        builder.store(zero, place).align = 1
        return builder.bitcast(builder.icmp_unsigned("!=", loaded, zero), ir.IntType(WORD))

    return types.uint64(flags, types.int64), codegen


_take_flags: Any = intrinsic(_set_flags)


def _set_bits(typingctx: Any, places: Any, start: Any, low: Any, gap: Any, offset: Any) -> Any:
    """Return 128 bits as two words: bit (place >> low) + gap * i + offset of the i-th of 8 places from ``start`` on."""
    pair = types.UniTuple(types.uint64, 2)  # type: ignore[no-untyped-call]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, lane = ir.IntType(WORD), ir.IntType(32)
        lanes = ir.VectorType(word, BITS)

        def each(number: int) -> Any:
            return ir.Constant(lanes, [number] * BITS)

        def all_lanes(scalar: Any) -> Any:
            first = builder.insert_element(ir.Constant(lanes, ir.Undefined), scalar, lane(0))
            return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(lane, BITS), [0] * BITS))

        source = context.make_array(sig.args[0])(context, builder, args[0])
        narrow = ir.VectorType(lane, BITS)
        loaded = builder.load(builder.bitcast(builder.gep(source.data, [args[1]]), narrow.as_pointer()))
        loaded.align = 4
        steps = builder.mul(all_lanes(args[3]), ir.Constant(lanes, list(range(BITS))))
        bits = builder.add(builder.lshr(builder.zext(loaded, lanes), all_lanes(args[2])), steps)
        bits = builder.add(bits, all_lanes(args[4]))
        flags = builder.shl(each(1), builder.and_(bits, each(WORD - 1)))
        is_low = builder.icmp_unsigned("<", bits, each(WORD))
        words = [builder.select(is_low, flags, each(0)), builder.select(is_low, each(0), flags)]
        return context.make_tuple(builder, sig.return_type, [_joined_lanes(builder, each) for each in words])

    return pair(places, types.int64, types.int64, types.int64, types.int64), codegen


def _joined_lanes(builder: Any, vector: Any) -> Any:
    """Return the lanes of a vector, joined by or."""
    size, lane = vector.type.count, ir.IntType(32)
    if size == 1:
        return builder.extract_element(vector, lane(0))
    half = ir.VectorType(lane, size // 2)
    low = builder.shuffle_vector(vector, vector, ir.Constant(half, list(range(size // 2))))
    high = builder.shuffle_vector(vector, vector, ir.Constant(half, list(range(size // 2, size))))
    return _joined_lanes(builder, builder.or_(low, high))


_bits_of_places: Any = intrinsic(_set_bits)


@jitted
def _put_word(highs: Any, number: Any, word: Any) -> Any:
    """Write a word, or what the map has of it."""
    if 8 * number + 8 <= highs.size:
        put64(highs, number, word)
    else:
        for place in range(8 * number, highs.size):
            highs[place] = word & np.uint64(255)
            word >>= np.uint64(8)


@jitted
def _moved_to(target: Any, highs: Any, number: Any, word: Any, following: Any) -> Any:
    """Write the word of this number, and the one after it where ``target`` lies beyond; return those from there on."""
    _put_word(highs, number, word)
    if target == number + 1:
        return target, following, np.uint64(0)
    _put_word(highs, number + 1, following)
    return target, np.uint64(0), np.uint64(0)


@jitted
def _put_dense(places: Any, low: Any, gap: Any, highs: Any) -> Any:
    """Set bits as `_put_map` does, 8 at a time where these lie within two words, as those of a dense map do."""
    highs[:] = 0
    number, word, following = np.int64(0), np.uint64(0), np.uint64(0)
    i = np.int64(0)
    while i < places.size:
        bit = (np.int64(places[i]) >> low) + gap * i
        if bit >> 6 > number + 1 or 8 * number + 8 > highs.size:
            if bit >> 6 > number:
                number, word, following = _moved_to(bit >> 6, highs, number, word, following)
        else:  # without a branch, which would be guessed wrong at most words: what is written early is written again
            put64(highs, number, word)
            stays = np.uint64(0) - np.uint64(bit >> 6 == number)
            word, following = (word & stays) | (following & ~stays), following & stays
            number = bit >> 6
        last = i + BITS - 1
        if last < places.size and (np.int64(places[last]) >> low) + gap * last < WORD * (number + 2):
            lower, upper = _bits_of_places(places, i, low, gap, gap * i - WORD * number)
            word, following = word | lower, following | upper
            i += BITS
        else:
            word |= np.uint64(1) << np.uint64(bit & 63)
            i += 1
    _moved_to(number + 2, highs, number, word, following)


@jitted
def _put_window(flags: Any, highs: Any) -> Any:
    """Write the flags of a window as bits, and clear them."""
    for number in range(highs.size // 8):
        put64(highs, number, _take_flags(flags, number))
    if highs.size % 8:
        word = np.uint64(_take_flags(flags, highs.size // 8))
        for place in range(highs.size // 8 * 8, highs.size):
            highs[place] = word & np.uint64(255)
            word >>= np.uint64(8)


@jitted
def _put_map(places: Any, low: Any, gap: Any, highs: Any) -> Any:
    """Set bit high + gap * i of every place in ``highs``, by a byte for each bit of a window of the map."""
    flags = np.zeros(WINDOW, np.uint8)
    base, steps = np.int64(0), np.int64(gap)
    for i in range(places.size):
        bit = (np.int64(places[i]) >> low) + steps * i - base
        while bit >= WINDOW:
            _put_window(flags, highs[base // 8 : base // 8 + WINDOW // 8])
            base += WINDOW
            bit -= WINDOW
        flags[np.uint64(bit)] = 1  # an index without a sign is not looked at
    while base < 8 * highs.size:
        _put_window(flags, highs[base // 8 : base // 8 + WINDOW // 8])
        base += WINDOW


@jitted
def put_places(places: Any, low: Any, gap: Any, lows: Any, highs: Any) -> Any:
    """Fill ``lows`` with the ``low`` low bits of ascending places, and set bit high + gap * i of each in ``highs``."""
    if MOST_APART * places.size > 8 * highs.size:
        _put_dense(places, np.int64(low), np.int64(gap), highs)
    else:
        _put_map(places, low, gap, highs)
    codes = np.empty(min(TILE, places.size), np.int32)
    mask = np.int32((np.int64(1) << low) - 1)
    for start in range(0, places.size if low else 0, TILE):
        part = places[start : start + TILE]
        for i in range(part.size):
            codes[i] = np.int32(part[i]) & mask
        pack_codes(codes[: part.size], low, lows[start * low // 8 : -(-(start + part.size) * low // 8)])


@jitted
def _joined(bits: Any, start: Any, count: Any, low: Any, gap: Any, lows: Any, codes: Any, places: Any) -> Any:
    """Put places together from their bits in the map and their low bits."""
    target = places[start : start + count]
    if low:
        unpack_codes(lows[start * low // 8 :], low, codes[:count])
        for i in range(count):
            target[i] = (np.int32(bits[i] - gap * np.int32(start + i)) << np.int32(low)) | codes[i]
    else:
        for i in range(count):
            target[i] = np.int32(bits[i] - gap * np.int32(start + i))


@jitted
def _find_in_bytes(bits: Any, found: Any, word: Any, base: Any) -> Any:
    """Write where bits of a word are set, byte by byte; return how many are found then."""
    for byte in range(8):
        before = word & ((np.uint64(1) << np.uint64(8 * byte)) - np.uint64(1))
        code = np.int64((word >> np.uint64(8 * byte)) & np.uint64(255))
        _put_found(bits, found + num_bits(before), BITS_OF, code, np.int32(base + 8 * byte))
    return found + num_bits(word)


@jitted
def _find_in_word(bits: Any, found: Any, word: Any, base: Any) -> Any:
    """Write where bits of a word are set, of which there are few: a few are written whether they are there or not."""
    left, place = word, np.uint64(found)
    for _ in range(FEW):
        bits[place] = np.int32(base + lowest_bit_or_64(left))
        left &= left - np.uint64(1)
        place += np.uint64(1)
    while left:
        bits[place] = np.int32(base + lowest_bit(left))
        left &= left - np.uint64(1)
        place += np.uint64(1)
    return found + num_bits(word)


@jitted
def get_places(lows: Any, highs: Any, low: Any, gap: Any, places: Any) -> Any:
    """Fill ``places`` with what ``put_places`` put down; return how many bits are set, places.size at most."""
    bits, codes = np.empty(TILE + 2 * WORD, np.int32), np.empty(TILE, np.int32)
    start, waiting = 0, 0
    low, gap = np.int32(low), np.int32(gap)
    is_sparse = WORD // FEW * places.size < 8 * highs.size
    for first in range(0, highs.size, 8):
        if first + 8 > highs.size:
            for byte in range(first, highs.size):
                waiting = _find_in_bytes(bits, waiting, np.uint64(highs[byte]), 8 * byte)
        elif is_sparse:
            waiting = _find_in_word(bits, waiting, get64(highs, first // 8), 8 * first)
        else:
            waiting = _find_in_bytes(bits, waiting, get64(highs, first // 8), 8 * first)
        if waiting >= TILE:
            count = min(TILE, places.size - start)
            _joined(bits, start, count, low, gap, lows, codes, places)
            start += count
            for i in range(WORD):
                bits[i] = bits[TILE + i]
            waiting -= TILE
    count = min(waiting, places.size - start)
    _joined(bits, start, count, low, gap, lows, codes, places)
    return start + count
