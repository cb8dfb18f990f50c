"""Codes on a GPU: half precision, bfloat16, int8 and sign. The messages are those of micro.codecs, bit for bit.

A program takes a tile of whole blocks, which share a scale. Sums are made in the order of `micro.codecs.blocks.sums`,
and quotients are rounded correctly, so that scales and codes are the bits that torch and numba's loops give on a CPU.
"""

from typing import Any

import triton.language as tl
from torch import Tensor

from micro.kernels.triton.launching import ALIGNED, BLOCK, each_block, kernel, launch, num_programs

TILE = 2048  # values of a program


@kernel
def cast_kernel(
    values: tl.tensor,
    codes: tl.tensor,
    numel: tl.tensor,
    IS_HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the bits of ``values`` (numel,), rounded to 16 and cut at the largest finite number, to ``codes`` int16."""
    each_block(numel, _cast, (values, codes), (IS_HALF,), ALIGNED, BLOCK)


@kernel
def _cast(arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> None:
    values, codes = arguments
    x = tl.load(values + offsets, mask=mask, other=0.0)
    if CONSTANTS[0]:
        rounded = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.int16, bitcast=True)
    else:  # to the nearest, ties to even, on the bits: Triton's interpreter would cut off
        patterns = x.to(tl.int32, bitcast=True)
        magnitudes = patterns & 0x7FFFFFFF
        highest = tl.minimum((magnitudes + 0x7FFF + ((magnitudes >> 16) & 1)) >> 16, 0x7F7F)
        rounded = (highest | ((patterns >> 16) & 0x8000)).to(tl.int16)
    tl.store(codes + offsets, rounded, mask=mask)


@kernel
def int8_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    numel: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write ``scales`` (blocks,) and ``codes`` (numel,) int8."""
    each_tile(numel, _int8, (values, scales, codes), (), ROWS, BLOCK)


@kernel
def _int8(
    arguments: tl.tuple,
    CONSTANTS: tl.tuple,
    rows: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    values, scales, codes = arguments
    offsets = offsets_of(rows, BLOCK)
    x = tl.load(values + offsets, mask=offsets < end, other=0.0)
    largest = tl.minimum(tl.max(tl.abs(x), axis=1), 1.7014118346046923e38)
    steps = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    multiples = divided(x, tl.where(steps > 0, steps, float("inf")))  # a block of zeros
    # to the nearest, ties to even: what lies below a unit of 1.5 * 2^23 is rounded off
    multiples = (multiples + 12582912.0) - 12582912.0
    tl.store(scales + rows, steps, mask=rows * BLOCK < end)
    codes_of_tile = tl.minimum(tl.maximum(multiples, -127.0), 127.0).to(tl.int8)
    tl.store(codes + offsets, codes_of_tile, mask=offsets < end)


@kernel
def signs_kernel(
    values: tl.tensor,
    means: tl.tensor,
    packed: tl.tensor,
    numel: tl.tensor,
    HALVINGS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the mean magnitude of each block, and a bit for each value, 1 where it is negative."""
    each_tile(numel, _signs, (values, means, packed), (HALVINGS,), ROWS, BLOCK)


@kernel
def _signs(
    arguments: tl.tuple,
    CONSTANTS: tl.tuple,
    rows: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    values, means, packed = arguments
    HALVINGS: tl.constexpr = CONSTANTS[0]
    offsets = offsets_of(rows, BLOCK)
    x = tl.load(values + offsets, mask=offsets < end, other=0.0)
    counts = tl.maximum(tl.minimum(end - rows * BLOCK, BLOCK), 1).to(tl.float32)
    terms = tl.abs(divided(x, counts))
    for i in tl.static_range(HALVINGS):  # the second half is added to the first, again and again
        terms = tl.sum(tl.reshape(terms, (ROWS, 2, BLOCK >> (i + 1))), axis=1)
    found = tl.minimum(tl.reshape(terms, (ROWS,)), 1.7014118346046923e38)
    tl.store(means + rows, found, mask=rows * BLOCK < end)
    BYTES: tl.constexpr = BLOCK // 8
    bits = tl.reshape((x < 0).to(tl.int32), (ROWS, BYTES, 8)) << tl.reshape(tl.arange(0, 8), (1, 1, 8))
    places = tl.expand_dims(rows * BYTES, 1) + tl.expand_dims(tl.arange(0, BYTES), 0)
    tl.store(packed + places, tl.sum(bits, axis=2).to(tl.uint8), mask=places < tl.cdiv(end, 8))


@kernel
def each_tile(
    numel: tl.tensor,
    BODY: tl.constexpr,
    arguments: tl.tuple,
    CONSTANTS: tl.tuple,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Call ``BODY(arguments, CONSTANTS, rows, end, ROWS, BLOCK)`` with the blocks (ROWS,) of this program.

    Their values stop before ``end``. See `launching.each_block` for the constants.
    """
    whole = numel // BLOCK
    lanes = tl.arange(0, ROWS)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        BODY(arguments, CONSTANTS, tl.program_id(0) * ROWS + lanes, whole * BLOCK, ROWS, BLOCK)
    else:
        BODY(arguments, CONSTANTS, whole + lanes, numel, ROWS, BLOCK)


@kernel
def offsets_of(rows: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the places (ROWS, BLOCK) of the values of blocks."""
    return tl.expand_dims(rows * BLOCK, 1) + tl.expand_dims(tl.arange(0, BLOCK), 0)


@kernel
def divided(x: tl.tensor, divisors: tl.tensor) -> tl.tensor:
    """Return ``x`` (ROWS, BLOCK) over ``divisors`` (ROWS,), correctly rounded."""
    return tl.div_rn(x, tl.broadcast_to(tl.expand_dims(divisors, 1), x.shape))


def cast(values: Tensor, codes: Tensor, *, is_half: bool) -> None:
    """Fill ``codes`` (numel,) int16 with halves, or with bfloat16."""
    numel = values.numel()
    constants = {"IS_HALF": is_half, "ALIGNED": ALIGNED, "BLOCK": BLOCK}
    launch(cast_kernel, num_programs(numel, BLOCK), values, values, codes, numel, **constants)


def int8(values: Tensor, scales: Tensor, codes: Tensor, *, block: int) -> None:
    """Fill scales (blocks,) float32 and codes (numel,) int8."""
    _launch(int8_kernel, values, block, values, scales, codes, values.numel())


def signs(values: Tensor, means: Tensor, packed: Tensor, *, block: int) -> None:
    """Fill means (blocks,) float32 and bits (numel / 8,) uint8."""
    _launch(signs_kernel, values, block, values, means, packed, values.numel(), HALVINGS=block.bit_length() - 1)


def _launch(function: Any, values: Tensor, block: int, *arguments: object, **constants: Any) -> None:
    """Start a program for each tile of whole blocks, and one for the short block at the end."""
    rows = TILE // block
    programs = -(-(values.numel() // block) // rows) + 1
    launch(function, programs, values, *arguments, **constants, ROWS=rows, BLOCK=block)
