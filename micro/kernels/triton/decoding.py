"""What the codes of messages stand for: their sum divided, or what is left of the values that were encoded.

Messages are rows (R, bytes) that may begin at any address, so that scales are copied to where they can be read.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.triton.launching import ALIGNED, BLOCK, each_block, kernel, launch, num_programs

TERNARY = 0  # in place of a width
LEVELS, SIGNS, MEANS, CAST, NATURAL = range(5)  # kinds of messages


@kernel
def _codes(packed: tl.tensor, offsets: tl.tensor, mask: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the int32 codes of ``WIDTH`` bits at ``offsets``; 0: digits of base 3, five to a byte."""
    if WIDTH == 0:
        found = tl.load(packed + offsets // 5, mask=mask, other=0).to(tl.int32)
        place = offsets % 5
        found = tl.where(place >= 1, found // 3, found)
        found = tl.where(place >= 2, found // 3, found)
        found = tl.where(place >= 3, found // 3, found)
        found = tl.where(place >= 4, found // 3, found)
        codes = found % 3
    else:
        PER_BYTE: tl.constexpr = 8 // WIDTH
        found = tl.load(packed + offsets // PER_BYTE, mask=mask, other=0).to(tl.int32)
        codes = (found >> (offsets % PER_BYTE * WIDTH)) & ((1 << WIDTH) - 1)
    return codes


@kernel
def _levels(
    scales: tl.tensor, packed: tl.tensor, offsets: tl.tensor, mask: tl.tensor, SETTINGS: tl.constexpr
) -> tl.tensor:
    """Return (code xor flipped) + lowest, times the scale that so many values share."""
    WIDTH: tl.constexpr = SETTINGS[0]
    codes = (_codes(packed, offsets, mask, WIDTH) ^ SETTINGS[1]) + SETTINGS[2]
    return codes.to(tl.float32) * tl.load(scales + offsets // SETTINGS[3], mask=mask, other=0)


@kernel
def _signs(
    scales: tl.tensor, packed: tl.tensor, offsets: tl.tensor, mask: tl.tensor, SETTINGS: tl.constexpr
) -> tl.tensor:
    """Return the block's mean, or less that where a bit is set."""
    upper = tl.load(scales + offsets // SETTINGS[0], mask=mask, other=0)
    return tl.where(_codes(packed, offsets, mask, 1) == 1, -upper, upper)


@kernel
def _means(
    scales: tl.tensor, packed: tl.tensor, offsets: tl.tensor, mask: tl.tensor, SETTINGS: tl.constexpr
) -> tl.tensor:
    """Return the block's upper mean, or its lower one where a bit is set; scales are pairs of them."""
    pairs = offsets // SETTINGS[0] * 2 + _codes(packed, offsets, mask, 1)
    return tl.load(scales + pairs, mask=mask, other=0)


@kernel
def _cast(
    scales: tl.tensor, packed: tl.tensor, offsets: tl.tensor, mask: tl.tensor, SETTINGS: tl.constexpr
) -> tl.tensor:
    """Return the numbers of 16 bits, half precision or bfloat16."""
    if SETTINGS[0]:
        values = tl.load(packed + offsets, mask=mask, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        patterns = tl.load(packed + offsets, mask=mask, other=0).to(tl.int32) << 16
        values = patterns.to(tl.float32, bitcast=True)
    return values


@kernel
def _natural(
    scales: tl.tensor, packed: tl.tensor, offsets: tl.tensor, mask: tl.tensor, SETTINGS: tl.constexpr
) -> tl.tensor:
    """Return sign and power of two above the field that the scale's bits are."""
    codes = tl.load(packed + offsets, mask=mask, other=0).to(tl.int32)
    powers = codes & 127
    patterns = tl.where(powers > 0, powers + tl.load(scales).to(tl.int32, bitcast=True), 0) << 23
    return patterns.to(tl.float32, bitcast=True) * (1 - 2 * (codes >> 7)).to(tl.float32)


@kernel
def _read(
    scales: tl.tensor,
    packed: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    KIND: tl.constexpr,
    SETTINGS: tl.constexpr,
) -> tl.tensor:
    """Return what a message of a kind holds; kinds are numbers here, as compiled kernels take functions in no tuple."""
    if KIND == 0:
        values = _levels(scales, packed, offsets, mask, SETTINGS)
    elif KIND == 1:
        values = _signs(scales, packed, offsets, mask, SETTINGS)
    elif KIND == 2:
        values = _means(scales, packed, offsets, mask, SETTINGS)
    elif KIND == 3:
        values = _cast(scales, packed, offsets, mask, SETTINGS)
    else:
        values = _natural(scales, packed, offsets, mask, SETTINGS)
    return values


@kernel
def _decoded(arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> None:
    scales, packed, x, out, is_finite, rows, row_scales, row_codes, divisor = arguments
    KIND: tl.constexpr = CONSTANTS[0]
    SETTINGS: tl.constexpr = CONSTANTS[1]
    IS_REST: tl.constexpr = CONSTANTS[2]
    total = _read(scales, packed, offsets, mask, KIND, SETTINGS)
    if IS_REST:
        total = tl.load(x + offsets, mask=mask, other=0) - total
    if CONSTANTS[3]:
        for row in range(1, rows):
            far = tl.cast(row, tl.int64)
            total += _read(scales + far * row_scales, packed + far * row_codes, offsets, mask, KIND, SETTINGS)
        total = tl.div_rn(total, tl.full(total.shape, divisor, tl.float32))
    tl.store(out + offsets, total, mask=mask)
    if not IS_REST:
        bad = mask & ((tl.abs(total) < float("inf")) == 0)
        if tl.sum(bad.to(tl.int32)) > 0:
            tl.store(is_finite, 0)


@kernel
def decode_kernel(
    scales: tl.tensor,
    packed: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    is_finite: tl.tensor,
    rows: tl.tensor,
    row_scales: tl.tensor,
    row_codes: tl.tensor,
    divisor: tl.tensor,
    numel: tl.tensor,
    KIND: tl.constexpr,
    SETTINGS: tl.constexpr,
    IS_REST: tl.constexpr,
    IS_MEAN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write to ``out`` (numel,) what a message holds; a mean of ``rows``, or ``x`` (numel,) less the message.

    ``is_finite`` (1,) int32 becomes 0 where what is written, but for the rest of x, is not finite.
    """
    arguments = (scales, packed, x, out, is_finite, rows, row_scales, row_codes, divisor)
    each_block(numel, _decoded, arguments, (KIND, SETTINGS, IS_REST, IS_MEAN), ALIGNED, BLOCK)


def decode(
    kind: int,
    scales: Tensor,
    codes: Tensor,
    out: Tensor,
    settings: tuple[int, ...],
    *,
    divisor: float = 1.0,
    x: Tensor | None = None,
) -> Tensor:
    """Fill ``out`` (numel,) with the sum of R messages, divided, or with ``x`` less the one that there is.

    Args:
        kind: of the messages.
        scales: (R, m), contiguous.
        codes: (R, bytes or more).

    Returns:
        () bool, whether all of ``out`` is finite; not known with ``x``.
    """
    is_finite = torch.ones(1, dtype=torch.int32, device=out.device)
    rows = codes.shape[0]
    strides = (scales.stride(0), codes.stride(0)) if rows > 1 else (0, 0)
    constants: dict[str, Any] = {"KIND": kind, "SETTINGS": settings, "IS_REST": x is not None}
    constants |= {"IS_MEAN": rows > 1 or divisor != 1, "ALIGNED": ALIGNED, "BLOCK": BLOCK}
    places = (scales, codes, out if x is None else x, out, is_finite, rows, *strides, divisor, out.numel())
    launch(decode_kernel, num_programs(out.numel(), BLOCK), out, *places, **constants)
    return is_finite.view(()) > 0
