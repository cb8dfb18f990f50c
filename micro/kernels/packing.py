"""Compiled packing of small whole numbers; `micro.bits` says how they lie."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from micro.kernels.jit import get32, get64, get64_at, jitted, lowest_bit, put32, put64, put64_at

LANES = 64
DIGITS = sum((np.arange(256) // 3**place % 3).astype(np.uint64) << np.uint64(8 * place) for place in range(5))


def _odd_in_word(typingctx: Any, codes: Any, start: Any) -> Any:
    """Return a word whose bit i tells whether the int32 code at ``start + i`` is odd."""
    signature = types.uint64(codes, start)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = ir.VectorType(ir.IntType(32), LANES)
        source = context.make_array(sig.args[0])(context, builder, args[0])
        loaded = builder.load(builder.bitcast(builder.gep(source.data, [args[1]]), lanes.as_pointer()))
        loaded.align = 4
        odd = builder.trunc(loaded, ir.VectorType(ir.IntType(1), LANES))
        return builder.bitcast(odd, ir.IntType(LANES))

    return signature, codegen


_set_in_word: Any = intrinsic(_odd_in_word)


@jitted
def pack_bits(codes: Any, packed: Any) -> Any:
    """Pack int32 codes of one bit."""
    whole = codes.size - codes.size % LANES
    for start in range(0, whole, LANES):
        word: Any = _set_in_word(codes, start)
        for byte in range(8):
            packed[start // 8 + byte] = (word >> np.uint64(8 * byte)) & np.uint64(255)
    pack_any(codes[whole:], 1, packed[whole // 8 :])


@jitted
def _put_rest(word: Any, filled: Any, packed: Any, place: Any) -> Any:
    """Put the low ``filled`` bits of ``word`` at byte ``place``."""
    while filled > 0:
        packed[place] = word & np.uint64(255)
        word >>= np.uint64(8)
        filled -= 8
        place += 1


@jitted
def pack_any(codes: Any, width: Any, packed: Any) -> Any:
    """Pack codes of ``width`` bits, up to 32."""
    word, filled, place = np.uint64(0), 0, 0
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for i in range(codes.size):
        word |= (np.uint64(codes[i]) & mask) << np.uint64(filled)
        filled += width
        if filled >= 32:
            put32(packed, place, word)
            word >>= np.uint64(32)
            filled -= 32
            place += 1
    _put_rest(word, filled, packed, 4 * place)


@jitted
def pack_codes(codes: Any, width: Any, packed: Any) -> Any:
    """Fill ``packed`` (at least ceil(numel * width / 8),) uint8 with int32 codes of ``width`` bits."""
    if width == 1:
        pack_bits(codes, packed)
    elif width == 8:
        for i in range(codes.size):
            packed[i] = codes[i]
    elif width == 4 or width == 2:
        each = 8 // width
        whole = codes.size // each
        if width == 4:
            for i in range(whole):
                packed[i] = codes[2 * i] | (codes[2 * i + 1] << np.int32(4))
        else:
            for i in range(whole):
                low = codes[4 * i] | (codes[4 * i + 1] << np.int32(2))
                packed[i] = low | (codes[4 * i + 2] << np.int32(4)) | (codes[4 * i + 3] << np.int32(6))
        pack_any(codes[whole * each :], width, packed[whole:])
    elif width < 8:
        whole = min(codes.size // 8, max(packed.size - 8, -width) // width + 1)  # a word is written at a time
        for i in range(whole):
            word = np.uint64(0)
            for j in range(8):
                word |= np.uint64(codes[8 * i + j]) << np.uint64(j * width)
            put64_at(packed, i * width, word)
        pack_any(codes[8 * whole :], width, packed[whole * width :])
    else:
        pack_any(codes, width, packed)


@jitted
def unpack_any(packed: Any, width: Any, codes: Any) -> Any:
    """Unpack codes of ``width`` bits, up to 32."""
    word, filled, place = np.uint64(0), 0, 0
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for i in range(codes.size):
        if filled < width and place + 4 <= packed.size:
            word |= get32(packed, place // 4) << np.uint64(filled)
            filled += 32
            place += 4
        while filled < width:
            word |= np.uint64(packed[place]) << np.uint64(filled)
            filled += 8
            place += 1
        codes[i] = np.int64(word & mask)
        word >>= np.uint64(width)
        filled -= width


@jitted
def unpack_codes(packed: Any, width: Any, codes: Any) -> Any:
    """Fill ``codes`` (numel,) int32 or int64 with what ``pack_codes`` packed."""
    if width == 4:
        whole = codes.size // 2
        for i in range(whole):
            byte = np.int32(packed[i])
            codes[2 * i] = byte & np.int32(15)
            codes[2 * i + 1] = byte >> np.int32(4)
        unpack_any(packed[whole:], 4, codes[2 * whole :])
    elif width == 8:
        for i in range(codes.size):
            codes[i] = packed[i]
    elif width < 8:
        mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
        whole = min(codes.size // 8, max(packed.size - 8, -width) // width + 1)  # a word is read at a time
        for i in range(whole):
            word = get64_at(packed, i * width)
            for j in range(8):
                codes[8 * i + j] = np.int64((word >> np.uint64(j * width)) & mask)
        unpack_any(packed[whole * width :], width, codes[8 * whole :])
    else:
        unpack_any(packed, width, codes)


@jitted
def pack_ternary(codes: Any, packed: Any) -> Any:
    """Pack int32 codes 0, 1, 2 five to a byte, the first as the lowest digit; what lacks at the end is 0."""
    whole = codes.size // 5
    for i in range(whole):
        high = codes[5 * i + 3] + np.int32(3) * codes[5 * i + 4]
        low = codes[5 * i] + np.int32(3) * codes[5 * i + 1] + np.int32(9) * codes[5 * i + 2]
        packed[i] = low + np.int32(27) * high
    if 5 * whole < codes.size:
        last = np.int32(0)
        for i in range(codes.size - 1, 5 * whole - 1, -1):
            last = last * np.int32(3) + codes[i]
        packed[whole] = last


@jitted
def unpack_ternary(packed: Any, count: Any, codes: Any) -> Any:
    """Fill ``codes`` (at least count + 8,) uint8 with the ``count`` codes that ``pack_ternary`` packed."""
    for i in range(-(-count // 5)):
        put64_at(codes, 5 * i, DIGITS[packed[i]])


@jitted
def put_places(places: Any, low: Any, gap: Any, lows: Any, highs: Any) -> Any:
    """Fill ``lows`` with the ``low`` low bits of ascending places, and set bit high + gap * i of each in ``highs``."""
    word, filled, place = np.uint64(0), 0, 0
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    bits, first = np.uint64(0), 0
    whole = 64 * (highs.size // 8)
    for i in range(places.size):
        if low:
            word |= (np.uint64(places[i]) & mask) << np.uint64(filled)
            filled += low
            if filled >= 32:
                put32(lows, place, word)
                word >>= np.uint64(32)
                filled -= 32
                place += 1
        bit = (np.int64(places[i]) >> low) + gap * i
        while bit >= first + 64:
            put64(highs, first // 64, bits)
            bits = np.uint64(0)
            first += 64
        bits |= np.uint64(1) << np.uint64(bit - first)
    _put_rest(word, filled, lows, 4 * place)
    while first < whole:
        put64(highs, first // 64, bits)
        bits = np.uint64(0)
        first += 64
    _put_rest(bits, 8 * highs.size - first, highs, first // 8)


@jitted
def get_places(lows: Any, highs: Any, low: Any, gap: Any, places: Any) -> Any:
    """Fill ``places`` with what ``put_places`` put down; return how many bits are set, places.size at most."""
    word, filled, place = np.uint64(0), 0, 0
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    found = 0
    for first in range(0, highs.size, 8):
        bits = np.uint64(0)
        if first + 8 <= highs.size:
            bits = get64(highs, first // 8)
        else:
            for byte in range(first, highs.size):
                bits |= np.uint64(highs[byte]) << np.uint64(8 * (byte - first))
        while bits and found < places.size:
            high = 8 * first + lowest_bit(bits) - gap * found
            bits &= bits - np.uint64(1)
            if low:
                if filled < low and place + 4 <= lows.size:
                    word |= get32(lows, place // 4) << np.uint64(filled)
                    filled += 32
                    place += 4
                while filled < low:
                    word |= np.uint64(lows[place]) << np.uint64(filled)
                    filled += 8
                    place += 1
                high = (high << low) | np.int64(word & mask)
                word >>= np.uint64(low)
                filled -= low
            places[found] = high
            found += 1
    return found
