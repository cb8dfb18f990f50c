"""Compiled packing of small integers and of ascending indices; `micro.codecs.bits` defines the format."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels.jit import get32, get64, jitted, lowest_bit, put32

TILE = 1 << 11  # codes that stay in the nearest cache; they fill whole bytes, whatever their width


@jitted
def pack_codes(codes: Any, width: Any, packed: Any) -> Any:
    """Fill ``packed`` (ceil(numel * width / 8),) uint8 with int32 codes of ``width`` bits, up to 32."""
    if width == 4:  # of codec qsgd: without a carry from code to code
        whole = codes.size // 2
        for i in range(whole):
            packed[i] = (codes[2 * i] & 15) | (codes[2 * i + 1] & 15) << 4
        if codes.size % 2:
            packed[whole] = codes[2 * whole] & 15
        return
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
    place *= 4
    while filled > 0:
        packed[place] = word & np.uint64(255)
        word >>= np.uint64(8)
        filled -= 8
        place += 1


@jitted
def unpack_codes(packed: Any, width: Any, codes: Any) -> Any:
    """Fill ``codes`` (numel,), int32 or int64, with what ``pack_codes`` packed."""
    if width == 4:
        whole = codes.size // 2
        for i in range(whole):
            codes[2 * i], codes[2 * i + 1] = packed[i] & np.uint8(15), packed[i] >> np.uint8(4)
        if codes.size % 2:
            codes[2 * whole] = packed[whole] & np.uint8(15)
        return
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
def _put_places(places: Any, low: Any, gap: Any, lows: Any, highs: Any) -> Any:
    """Fill ``lows`` with the ``low`` low bits of ascending int32 places, and set bit high + gap * i in ``highs``."""
    highs[:] = 0
    for i in range(places.size):
        bit = (np.int64(places[i]) >> low) + gap * i
        highs[bit >> 3] |= np.uint8(1) << np.uint8(bit & 7)
    if low:
        codes, mask = np.empty(min(TILE, places.size), np.int32), np.int32((np.int64(1) << low) - 1)
        for start in range(0, places.size, TILE):
            part = places[start : start + TILE]
            for i in range(part.size):
                codes[i] = part[i] & mask
            pack_codes(codes[: part.size], low, lows[start * low // 8 : -(-(start + part.size) * low // 8)])


@jitted
def _get_places(lows: Any, highs: Any, low: Any, gap: Any, places: Any) -> Any:
    """Fill ``places`` (m,) int32 with what `_put_places` put down."""
    found = 0
    for start in range(0, highs.size, 8):
        if start + 8 <= highs.size:
            word = get64(highs, start // 8)
        else:
            word = np.uint64(0)
            for byte in range(start, highs.size):
                word |= np.uint64(highs[byte]) << np.uint64(8 * (byte - start))
        while word and found < places.size:
            places[found] = (8 * start + lowest_bit(word) - gap * found) << low
            word &= word - np.uint64(1)
            found += 1
    if low:
        codes = np.empty(min(TILE, places.size), np.int32)
        for start in range(0, places.size, TILE):
            part = places[start : start + TILE]
            unpack_codes(lows[start * low // 8 :], low, codes[: part.size])
            for i in range(part.size):
                part[i] |= codes[i]


def pack(codes: Tensor, width: int, packed: Tensor) -> None:
    """Fill ``packed`` as `micro.codecs.bits.pack` has it."""
    pack_codes(codes.to(torch.int32).contiguous().numpy(), width, packed.numpy())


def unpack(packed: Tensor, width: int, codes: Tensor) -> None:
    """Fill ``codes`` (count,) as `micro.codecs.bits.unpack` has them."""
    unpack_codes(packed.contiguous().numpy(), width, codes.numpy())


def put_places(places: Tensor, low: int, gap: int, lows: Tensor, highs: Tensor) -> None:
    """Fill ``lows`` and ``highs`` as `micro.codecs.indices` has them of ascending places."""
    _put_places(places.contiguous().numpy(), low, gap, lows.numpy(), highs.numpy())


def get_places(lows: Tensor, highs: Tensor, low: int, gap: int, places: Tensor) -> None:
    """Fill ``places`` with what `put_places` put down."""
    _get_places(lows.numpy(), highs.numpy(), low, gap, places.numpy())
