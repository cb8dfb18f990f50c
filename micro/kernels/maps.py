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


def _bits_of_bytes() -> np.ndarray:
    """Return (256, 8) uint8: which bits of a byte are set, ascending, then zeros."""
    rows = [[bit for bit in range(BITS) if byte >> bit & 1] for byte in range(256)]
    return np.array([row + [0] * (BITS - len(row)) for row in rows], np.uint8)


BITS_OF = _bits_of_bytes()
COUNTS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


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
def _find_in_byte(bits: Any, found: Any, byte: Any, base: Any) -> Any:
    """Write where bits of a byte are set; return how many are found then."""
    _put_found(bits, found, BITS_OF, np.int64(byte), np.int32(base))
    return found + np.int64(COUNTS[byte])


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
                waiting = _find_in_byte(bits, waiting, highs[byte], 8 * byte)
        elif is_sparse:
            waiting = _find_in_word(bits, waiting, get64(highs, first // 8), 8 * first)
        else:
            for byte in range(first, first + 8):
                waiting = _find_in_byte(bits, waiting, highs[byte], 8 * byte)
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
