"""Codes of values that share a scale with the others of their block: int8, QSGD, TernGrad, sign, 1-bit.

The messages are those that the codecs in micro.codecs make, bit for bit.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.triton.blockwise import (
    cut,
    divided,
    each_tile,
    factors,
    largest_magnitudes,
    num_tiles,
    offsets_of,
    rows_of_tile,
    store_packed,
    sums,
    uniform,
)
from micro.kernels.triton.launching import BLOCK, kernel, launch

Words = tuple[int, int]


@kernel
def int8_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    numel: tl.tensor,
    IS_RANDOM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write ``scales`` (blocks,) and ``codes`` (numel,) int8."""
    each_tile(numel, _int8, (values, scales, codes, first, second), (IS_RANDOM,), ROWS, BLOCK)


@kernel
def _int8(
    arguments: tl.tuple,
    CONSTANTS: tl.tuple,
    rows: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    values, scales, codes, first, second = arguments
    offsets = offsets_of(rows, BLOCK)
    x = tl.load(values + offsets, mask=offsets < end, other=0.0)
    largest = largest_magnitudes(x)
    steps = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    multiples = divided(x, steps)
    if CONSTANTS[0]:
        multiples = tl.floor(multiples + uniform(offsets, first, second))
    else:  # to the nearest, ties to even: what lies below a unit of 1.5 * 2^23 is rounded off
        multiples = (multiples + 12582912.0) - 12582912.0
    tl.store(scales + rows, steps, mask=rows * BLOCK < end)
    tl.store(codes + offsets, cut(multiples, 127.0).to(tl.int8), mask=offsets < end)


@kernel
def levels_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    packed: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    numel: tl.tensor,
    IS_LEAST_SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> None:
    """Write ``scales`` (blocks,) and the ``packed`` levels of QSGD."""
    arguments = (values, scales, packed, first, second)
    each_tile(numel, _levels, arguments, (IS_LEAST_SQUARES, HALVINGS, WIDTH), ROWS, BLOCK)


@kernel
def _levels(
    arguments: tl.tuple,
    CONSTANTS: tl.tuple,
    rows: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    values, scales, packed, first, second = arguments
    IS_LEAST_SQUARES: tl.constexpr = CONSTANTS[0]
    HALVINGS: tl.constexpr = CONSTANTS[1]
    WIDTH: tl.constexpr = CONSTANTS[2]
    HIGHEST: tl.constexpr = (1 << (WIDTH - 1)) - 1
    offsets = offsets_of(rows, BLOCK)
    x = tl.load(values + offsets, mask=offsets < end, other=0.0)
    largest = largest_magnitudes(x)
    shares = divided(x, largest)
    if IS_LEAST_SQUARES:
        scaled = shares
    else:
        norms = tl.sqrt_rn(sums(shares * shares, ROWS, BLOCK, HALVINGS))
        scaled = divided(shares, norms)
    levels = cut(tl.floor(scaled * (HIGHEST * 1.0) + uniform(offsets, first, second)), HIGHEST * 1.0)
    levels = tl.where(offsets < end, levels, 0.0)
    if IS_LEAST_SQUARES:
        worth = factors(shares, levels, ROWS, BLOCK, HALVINGS)
    else:
        worth = tl.div_rn(norms, tl.full(norms.shape, HIGHEST * 1.0, tl.float32))
    tl.store(scales + rows, cut(worth * largest, 1.7014118346046923e38 / HIGHEST), mask=rows * BLOCK < end)
    codes = tl.where(offsets < end, levels.to(tl.int32) + HIGHEST, 0)
    store_packed(packed, codes, rows, end, WIDTH, ROWS, BLOCK)


@kernel
def ternary_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    digits: tl.tensor,
    clip: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    numel: tl.tensor,
    IS_LEAST_SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> None:
    """Write ``scales`` (blocks,) and the ``digits`` (numel,) uint8 of TernGrad: 0, 1 or 2."""
    arguments = (values, scales, digits, clip, first, second)
    each_tile(numel, _ternary, arguments, (IS_LEAST_SQUARES, HALVINGS), ROWS, BLOCK)


@kernel
def _ternary(
    arguments: tl.tuple,
    CONSTANTS: tl.tuple,
    rows: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    values, scales, digits, clip, first, second = arguments
    IS_LEAST_SQUARES: tl.constexpr = CONSTANTS[0]
    HALVINGS: tl.constexpr = CONSTANTS[1]
    offsets = offsets_of(rows, BLOCK)
    x = tl.load(values + offsets, mask=offsets < end, other=0.0)
    largest = largest_magnitudes(x)
    shares = divided(x, largest)
    counts = tl.maximum(tl.minimum(end - rows * BLOCK, BLOCK), 1).to(tl.float32)
    roots = tl.sqrt_rn(tl.div_rn(sums(shares * shares, ROWS, BLOCK, HALVINGS), counts))
    limits = tl.minimum(roots * clip, 1.0)
    codes = (tl.abs(divided(shares, limits)) > uniform(offsets, first, second)).to(tl.float32)
    codes = codes * ((shares > 0).to(tl.float32) - (shares < 0).to(tl.float32))
    worth = factors(shares, codes, ROWS, BLOCK, HALVINGS) if IS_LEAST_SQUARES else limits
    tl.store(scales + rows, cut(worth * largest, 1.7014118346046923e38), mask=rows * BLOCK < end)
    tl.store(digits + offsets, (codes.to(tl.int32) + 1).to(tl.uint8), mask=offsets < end)


@kernel
def pack_ternary_kernel(digits: tl.tensor, packed: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Write five ``digits`` (numel,) to each byte, the first as the lowest."""
    bytes_ = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    filled = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(5):
        places = 5 * bytes_ + (4 - i)
        filled = 3 * filled + tl.load(digits + places, mask=(places < numel) & (places >= 0), other=0).to(tl.int32)
    tl.store(packed + bytes_, filled.to(tl.uint8), mask=bytes_ < tl.cdiv(numel, 5))


@kernel
def signs_kernel(
    values: tl.tensor,
    uppers: tl.tensor,
    lowers: tl.tensor,
    packed: tl.tensor,
    numel: tl.tensor,
    HAS_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> None:
    """Write a bit for each value, 1 where it is negative, and what the bits of each block stand for."""
    each_tile(numel, _signs, (values, uppers, lowers, packed), (HAS_TWO, HALVINGS), ROWS, BLOCK)


@kernel
def _signs(
    arguments: tl.tuple,
    CONSTANTS: tl.tuple,
    rows: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    values, uppers, lowers, packed = arguments
    HAS_TWO: tl.constexpr = CONSTANTS[0]
    HALVINGS: tl.constexpr = CONSTANTS[1]
    offsets = offsets_of(rows, BLOCK)
    x = tl.load(values + offsets, mask=offsets < end, other=0.0)
    negative = (x < 0).to(tl.int32)
    counts = tl.minimum(end - rows * BLOCK, BLOCK)
    if HAS_TWO:
        num_negative = tl.sum(negative, axis=1)
        others = tl.maximum(counts - num_negative, 1).to(tl.float32)
        upper = sums(tl.where(negative == 0, divided(x, others), 0.0), ROWS, BLOCK, HALVINGS)
        below = tl.maximum(num_negative, 1).to(tl.float32)
        lower = sums(tl.where(negative == 1, divided(x, below), 0.0), ROWS, BLOCK, HALVINGS)
        tl.store(lowers + rows, cut(lower, 1.7014118346046923e38), mask=rows * BLOCK < end)
    else:
        upper = sums(tl.abs(divided(x, tl.maximum(counts, 1).to(tl.float32))), ROWS, BLOCK, HALVINGS)
    tl.store(uppers + rows, cut(upper, 1.7014118346046923e38), mask=rows * BLOCK < end)
    store_packed(packed, negative, rows, end, 1, ROWS, BLOCK)


def int8(values: Tensor, wire: Tensor, words: Words | None, *, block: int) -> None:
    """Fill the message of codec int8; None for ``words``: rounded to the nearest."""
    scales, codes = _parted(wire, values.numel(), block)
    arguments = (values, scales, codes.view(torch.int8), *signed(words or (0, 0)), values.numel())
    _launch(int8_kernel, values, block, *arguments, IS_RANDOM=words is not None)


def levels(values: Tensor, wire: Tensor, words: Words, *, block: int, bits: int, is_least_squares: bool) -> None:
    """Fill the message of codec qsgd."""
    arguments = (values, *_parted(wire, values.numel(), block), *signed(words), values.numel())
    constants = {"IS_LEAST_SQUARES": is_least_squares, "WIDTH": bits, "HALVINGS": block.bit_length() - 1}
    _launch(levels_kernel, values, block, *arguments, **constants)


def ternary(values: Tensor, wire: Tensor, words: Words, *, block: int, clip: float, is_least_squares: bool) -> None:
    """Fill the message of codec terngrad, magnitudes cut at ``clip`` root mean squares."""
    numel = values.numel()
    scales, packed = _parted(wire, numel, block)
    digits = torch.empty(numel, dtype=torch.uint8, device=values.device)
    arguments = (values, scales, digits, clip, *signed(words), numel)
    constants = {"IS_LEAST_SQUARES": is_least_squares, "HALVINGS": block.bit_length() - 1}
    _launch(ternary_kernel, values, block, *arguments, **constants)
    launch(pack_ternary_kernel, -(-packed.numel() // BLOCK), values, digits, packed, numel, BLOCK=BLOCK)


def signs(values: Tensor, wire: Tensor, *, block: int, has_two: bool) -> None:
    """Fill the message of codec onebit (``has_two``) or sign."""
    scales, packed = _parted(wire, values.numel(), block, 1 + has_two)
    uppers, lowers = scales.chunk(2) if has_two else (scales, scales)
    arguments = (values, uppers, lowers, packed, values.numel())
    _launch(signs_kernel, values, block, *arguments, HAS_TWO=has_two, HALVINGS=block.bit_length() - 1)


def _parted(wire: Tensor, count: int, block: int, num_scales: int = 1) -> tuple[Tensor, Tensor]:
    """Return the float32 scales of a message of ``count`` values, so many for a block, and the bytes of its codes."""
    length = 4 * num_scales * -(-count // block)
    return wire[:length].view(torch.float32), wire[length:]


def _launch(function: Any, values: Tensor, block: int, *arguments: object, **constants: Any) -> None:
    sizes = {"ROWS": rows_of_tile(block), "BLOCK": block}
    launch(function, num_tiles(values.numel(), block), values, *arguments, **constants, **sizes)


def signed(words: Words) -> tuple[int, int]:
    """Return the words as whole numbers of 32 bits with a sign."""
    first, second = (word - (1 << 32) if word >> 31 else word for word in words)
    return first, second
