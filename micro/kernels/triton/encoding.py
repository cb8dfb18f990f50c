"""Codes on a GPU: half precision, bfloat16, int8 and sign. The messages are those of micro.codecs, bit for bit.

A program takes a tile of whole blocks, which share a scale. Sums are made in the order of `micro.codecs.blocks.sums`,
and quotients are rounded correctly, so that scales and codes are the bits that torch and numba's loops give on a CPU.
"""

import triton.language as tl
from torch import Tensor

from micro.kernels.triton.launching import BLOCK, kernel, launch, num_programs, places

TILE = 2048  # values of a program


@kernel
def cast_kernel(
    values: tl.tensor, codes: tl.tensor, numel: tl.tensor, IS_HALF: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Write the bits of ``values`` (numel,), rounded to 16 and cut at the largest finite number, to ``codes`` int16."""
    offsets, mask = places(numel, BLOCK)
    x = tl.load(values + offsets, mask=mask, other=0.0)
    if IS_HALF:
        rounded = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.int16, bitcast=True)
    else:  # to the nearest, ties to even, on the bits: Triton's interpreter would cut off
        patterns = x.to(tl.int32, bitcast=True)
        magnitudes = patterns & 0x7FFFFFFF
        highest = tl.minimum((magnitudes + 0x7FFF + ((magnitudes >> 16) & 1)) >> 16, 0x7F7F)
        rounded = (highest | ((patterns >> 16) & 0x8000)).to(tl.int16)
    tl.store(codes + offsets, rounded, mask=mask)


@kernel
def tile(values: tl.tensor, numel: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the numbers (ROWS,) of this program's blocks, and the places and the values of these (ROWS, BLOCK)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = tl.expand_dims(rows * BLOCK, 1) + tl.expand_dims(tl.arange(0, BLOCK), 0)
    return rows, offsets, tl.load(values + offsets, mask=offsets < numel, other=0.0)


@kernel
def divided(x: tl.tensor, divisors: tl.tensor) -> tl.tensor:
    """Return ``x`` (ROWS, BLOCK) over ``divisors`` (ROWS,), correctly rounded."""
    return tl.div_rn(x, tl.broadcast_to(tl.expand_dims(divisors, 1), x.shape))


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
    rows, offsets, x = tile(values, numel, ROWS, BLOCK)
    largest = tl.minimum(tl.max(tl.abs(x), axis=1), 1.7014118346046923e38)
    steps = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    multiples = divided(x, tl.where(steps > 0, steps, float("inf")))  # a block of zeros
    # to the nearest, ties to even: what lies below a unit of 1.5 * 2^23 is rounded off
    multiples = (multiples + 12582912.0) - 12582912.0
    tl.store(scales + rows, steps, mask=rows * BLOCK < numel)
    tl.store(codes + offsets, tl.minimum(tl.maximum(multiples, -127.0), 127.0).to(tl.int8), mask=offsets < numel)


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
    rows, _, x = tile(values, numel, ROWS, BLOCK)
    counts = tl.maximum(tl.minimum(numel - rows * BLOCK, BLOCK), 1).to(tl.float32)
    terms = tl.abs(divided(x, counts))
    for i in tl.static_range(HALVINGS):  # the second half is added to the first, again and again
        terms = tl.sum(tl.reshape(terms, (ROWS, 2, BLOCK >> (i + 1))), axis=1)
    found = tl.minimum(tl.reshape(terms, (ROWS,)), 1.7014118346046923e38)
    tl.store(means + rows, found, mask=rows * BLOCK < numel)
    BYTES: tl.constexpr = BLOCK // 8
    bits = tl.reshape((x < 0).to(tl.int32), (ROWS, BYTES, 8)) << tl.reshape(tl.arange(0, 8), (1, 1, 8))
    targets = tl.expand_dims(rows * BYTES, 1) + tl.expand_dims(tl.arange(0, BYTES), 0)
    tl.store(packed + targets, tl.sum(bits, axis=2).to(tl.uint8), mask=targets < tl.cdiv(numel, 8))


def cast(values: Tensor, codes: Tensor, *, is_half: bool) -> None:
    """Fill ``codes`` (numel,) int16 with halves, or with bfloat16."""
    numel = values.numel()
    launch(cast_kernel, num_programs(numel), values, values, codes, numel, IS_HALF=is_half, BLOCK=BLOCK)


def int8(values: Tensor, scales: Tensor, codes: Tensor, *, block: int) -> None:
    """Fill scales (blocks,) float32 and codes (numel,) int8."""
    arguments = values, scales, codes, values.numel()
    launch(int8_kernel, num_programs(values.numel(), TILE), values, *arguments, ROWS=TILE // block, BLOCK=block)


def signs(values: Tensor, means: Tensor, packed: Tensor, *, block: int) -> None:
    """Fill means (blocks,) float32 and bits (numel / 8,) uint8."""
    arguments = values, means, packed, values.numel()
    constants = {"HALVINGS": block.bit_length() - 1, "ROWS": TILE // block, "BLOCK": block}
    launch(signs_kernel, num_programs(values.numel(), TILE), values, *arguments, **constants)
