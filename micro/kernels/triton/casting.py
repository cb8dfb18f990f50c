"""Codes of single values: half precision, bfloat16, and natural compression (sign and power of two).

The messages are those that the codecs in micro.codecs make, bit for bit.
"""

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.triton.blockwise import noise
from micro.kernels.triton.encoding import Words, signed
from micro.kernels.triton.launching import ALIGNED, BLOCK, each_block, kernel, launch, num_programs


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
def _exponents(
    values: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    IS_RANDOM: tl.constexpr,
) -> tl.tensor:
    """Return the exponent fields of the values, rounded to a power of two, and the values."""
    x = tl.load(values + offsets, mask=mask, other=0.0)
    if IS_RANDOM:
        dither = (noise(offsets, first, second) >> 9).to(tl.int32)
    else:
        dither = tl.full(offsets.shape, 1 << 22, tl.int32)
    patterns = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) + dither
    return tl.minimum(patterns >> 23, 254), x


@kernel
def _highest_power(
    arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor
) -> None:
    values, highest, first, second = arguments
    powers, _ = _exponents(values, offsets, mask, first, second, CONSTANTS[0])
    tl.atomic_max(highest, tl.max(tl.where(mask, powers, 0)))


@kernel
def highest_power_kernel(
    values: tl.tensor,
    highest: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    numel: tl.tensor,
    IS_RANDOM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Raise ``highest`` (1,) int32 to the highest exponent field of the rounded values."""
    each_block(numel, _highest_power, (values, highest, first, second), (IS_RANDOM,), ALIGNED, BLOCK)


@kernel
def _natural(arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> None:
    values, below, codes, first, second = arguments
    powers, x = _exponents(values, offsets, mask, first, second, CONSTANTS[0])
    code = tl.maximum(powers - tl.load(below), 0) | tl.where(x < 0, 128, 0)
    tl.store(codes + offsets, code.to(tl.uint8), mask=mask)


@kernel
def natural_kernel(
    values: tl.tensor,
    below: tl.tensor,
    codes: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    numel: tl.tensor,
    IS_RANDOM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write sign and power of two above the field ``below`` (1,) of each value to ``codes`` (numel,) uint8."""
    each_block(numel, _natural, (values, below, codes, first, second), (IS_RANDOM,), ALIGNED, BLOCK)


def cast(values: Tensor, wire: Tensor, *, is_half: bool) -> None:
    """Fill the message of codec half (``is_half``) or bfloat16."""
    arguments = (values, wire.view(torch.int16), values.numel())
    programs = num_programs(values.numel(), BLOCK)
    launch(cast_kernel, programs, values, *arguments, IS_HALF=is_half, ALIGNED=ALIGNED, BLOCK=BLOCK)


def natural(values: Tensor, wire: Tensor, words: Words | None) -> None:
    """Fill the message of codec natural; None for ``words``: rounded to the nearer power."""
    programs, header, codes = num_programs(values.numel(), BLOCK), wire[:4].view(torch.int32), wire[4:]
    constants = {"ALIGNED": ALIGNED, "BLOCK": BLOCK, "IS_RANDOM": words is not None}
    drawn = (*signed(words or (0, 0)), values.numel())
    header.zero_()
    launch(highest_power_kernel, programs, values, values, header, *drawn, **constants)
    header.sub_(127).clamp_(min=0)
    launch(natural_kernel, programs, values, values, header, codes, *drawn, **constants)
