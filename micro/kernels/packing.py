"""Compiled packing of small whole numbers; `micro.bits` says how they lie."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from micro.kernels.jit import get32, jitted, put32, put64_at

LANES = 64
GROUP = 8  # codes that fill whole bytes together, whatever their width
WORD_BYTES = 8
TILE = 1 << 11  # codes that stay in the nearest cache
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


def _spread_group(typingctx: Any, packed: Any, place: Any, width: Any, codes: Any, start: Any) -> Any:
    """Unpack 8 codes of up to 16 bits, from byte ``place`` on, into int32 ``codes`` from ``start`` on.

    Each half of them lies in the 64 bits from a byte on: two words are read, and shifted by lanes.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, half = ir.IntType(64), GROUP // 2
        lanes = ir.VectorType(word, GROUP)
        source = context.make_array(sig.args[0])(context, builder, args[0])
        half_bits = builder.mul(args[2], word(half))
        second = builder.add(args[1], builder.lshr(half_bits, word(3)))
        pair = ir.Constant(ir.VectorType(word, 2), ir.Undefined)
        for i, place in enumerate((args[1], second)):
            loaded = builder.load(builder.bitcast(builder.gep(source.data, [place]), word.as_pointer()))
            loaded.align = 1
            pair = builder.insert_element(pair, loaded, ir.IntType(32)(i))
        number = ir.VectorType(ir.IntType(32), GROUP)
        words = builder.shuffle_vector(pair, pair, ir.Constant(number, [i // half for i in range(GROUP)]))

        def all_lanes(scalar: Any) -> Any:
            first = builder.insert_element(ir.Constant(lanes, ir.Undefined), scalar, ir.IntType(32)(0))
            return builder.shuffle_vector(first, first, ir.Constant(number, [0] * GROUP))

        into = builder.and_(half_bits, word(7))  # where the second half begins in its byte
        steps = ir.Constant(lanes, [i % half for i in range(GROUP)])
        is_second = ir.Constant(lanes, [i // half for i in range(GROUP)])
        shifts = builder.add(builder.mul(all_lanes(args[2]), steps), builder.mul(all_lanes(into), is_second))
        mask = builder.sub(builder.shl(word(1), args[2]), word(1))
        found = builder.and_(builder.lshr(words, shifts), all_lanes(mask))
        target = context.make_array(sig.args[3])(context, builder, args[3])
        out = builder.bitcast(builder.gep(target.data, [args[4]]), number.as_pointer())
        builder.store(builder.trunc(found, number), out).align = 4
        return context.get_dummy_value()

    return types.void(packed, types.int64, types.int64, codes, types.int64), codegen


_set_in_word: Any = intrinsic(_odd_in_word)
_take_group: Any = intrinsic(_spread_group)


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
def _whole_groups(count: Any, width: Any, num_bytes: Any) -> Any:
    """Return how many groups of 8 codes can be written in words of 64 bits that stay within the bytes."""
    room = num_bytes - (8 if width <= 8 else 16)
    return min(count // 8, room // width + 1) if room >= 0 else 0


@jitted
def _paired(pairs: Any, width: Any, joined: Any) -> Any:
    """Join numbers of ``width`` bits, two in a word, 32 bits apart, to one of twice the width."""
    shift, mask = np.uint64(32 - width), (np.uint64(1) << np.uint64(2 * width)) - np.uint64(1)
    for i in range(pairs.size):
        joined[i] = (pairs[i] | (pairs[i] >> shift)) & mask


@jitted
def _words_of(codes: Any, width: Any, halves: Any, quarters: Any, words: Any) -> Any:
    """Fill ``words`` with the codes, eight in each where their width is below 8, four else; the rest is memory."""
    if width < 8:
        _paired(codes.view(np.uint64), width, halves)
        _paired(halves.view(np.uint64), 2 * width, quarters)
        _last_paired(quarters.view(np.uint64), 4 * width, words)
    else:
        _paired(codes.view(np.uint64), width, halves)
        _last_paired(halves.view(np.uint64), 2 * width, words)


@jitted
def _last_paired(pairs: Any, width: Any, words: Any) -> Any:
    """Join as `_paired` does, to words of up to 64 bits."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32 - width)
    for i in range(pairs.size):
        words[i] = (pairs[i] & low) | ((pairs[i] & ~low) >> shift)


@jitted
def _pack_groups(codes: Any, width: Any, packed: Any) -> Any:
    """Pack groups of 8 codes of up to 16 bits, but 4 and 8; a word is written at a time."""
    size = min(TILE, codes.size)
    halves, quarters, words = (
        np.empty(size // 2, np.uint32),
        np.empty(size // 4, np.uint32),
        np.empty(size // 4, np.uint64),
    )
    for start in range(0, codes.size, TILE):
        part = codes[start : start + TILE]
        count = part.size // 8 if width < 8 else part.size // 4
        _words_of(part, width, halves[: part.size // 2], quarters[: part.size // 4], words[:count])
        target = packed[start * width // 8 :]
        if width < 8:
            for i in range(count):
                put64_at(target, i * width, words[i])
        elif width == 16:
            for i in range(count):
                put64_at(target, 8 * i, words[i])
        else:
            for i in range(count // 2):
                low, high = words[2 * i], words[2 * i + 1]
                put64_at(target, i * width, low | (high << np.uint64(4 * width)))
                put64_at(target, i * width + 8, high >> np.uint64(64 - 4 * width))


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
    elif width <= 16:
        whole = _whole_groups(codes.size, width, packed.size)
        _pack_groups(codes[: 8 * whole], width, packed)
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
    """Fill ``codes`` (numel,) int32 with what ``pack_codes`` packed."""
    whole = 0
    if width <= 16:
        room = packed.size - WORD_BYTES - width // 2
        whole = min(codes.size // GROUP, room // width + 1) if room >= 0 else 0
        for i in range(whole):
            _take_group(packed, i * width, width, codes, GROUP * i)
    unpack_any(packed[whole * width :], width, codes[GROUP * whole :])


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
