"""Codes of single values: half precision, bfloat16, and natural compression (sign and power of two).

Each returns the whole message of contiguous float32 values on a GPU: the bytes that its codec in micro.codecs makes.
"""

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.triton.blockwise import noise
from micro.kernels.triton.encoding import Words, signed
from micro.kernels.triton.launching import ALIGNED, BLOCK, kernel, launch, num_programs


@kernel
def _cast(values: tl.tensor, codes: tl.tensor, offsets: tl.tensor, mask: tl.tensor, IS_HALF: tl.constexpr) -> None:
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
def cast_kernel(
    values: tl.tensor,
    codes: tl.tensor,
    numel: tl.tensor,
    IS_HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the bits of ``values`` (numel,), rounded to 16 and cut at the largest finite number, to ``codes`` int16."""
    block = tl.program_id(0)
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < tl.num_programs(0) - 1:
        offsets = block * BLOCK + lanes
        _cast(values, codes, offsets, offsets < whole, IS_HALF)
    else:
        offsets = whole + lanes
        _cast(values, codes, offsets, offsets < numel, IS_HALF)


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
    block = tl.program_id(0)
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < tl.num_programs(0) - 1:
        offsets = block * BLOCK + lanes
        powers, _ = _exponents(values, offsets, offsets < whole, first, second, IS_RANDOM)
        tl.atomic_max(highest, tl.max(tl.where(offsets < whole, powers, 0)))
    else:
        offsets = whole + lanes
        powers, _ = _exponents(values, offsets, offsets < numel, first, second, IS_RANDOM)
        tl.atomic_max(highest, tl.max(tl.where(offsets < numel, powers, 0)))


@kernel
def _natural(
    values: tl.tensor,
    below: tl.tensor,
    codes: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    IS_RANDOM: tl.constexpr,
) -> None:
    powers, x = _exponents(values, offsets, mask, first, second, IS_RANDOM)
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
    block = tl.program_id(0)
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < tl.num_programs(0) - 1:
        offsets = block * BLOCK + lanes
        _natural(values, below, codes, offsets, offsets < whole, first, second, IS_RANDOM)
    else:
        offsets = whole + lanes
        _natural(values, below, codes, offsets, offsets < numel, first, second, IS_RANDOM)


def encode_cast(values: Tensor, *, is_half: bool) -> Tensor:
    """Return the message of codec half (``is_half``) or bfloat16; `Tensor.copy_` decodes it."""
    codes = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
    programs = num_programs(values.numel(), BLOCK)
    arguments = (values, codes, values.numel())
    launch(cast_kernel, programs, values, *arguments, IS_HALF=is_half, ALIGNED=ALIGNED, BLOCK=BLOCK)
    return codes.view(torch.uint8)


def encode_natural(values: Tensor, words: Words | None) -> Tensor:
    """Return the message of codec natural; None for ``words``: rounded to the nearer power."""
    count = values.numel()
    wire = torch.zeros(4 + count, dtype=torch.uint8, device=values.device)
    header, codes = wire[:4].view(torch.int32), wire[4:]
    noise_of, constants = signed(words or (0, 0)), {"ALIGNED": ALIGNED, "BLOCK": BLOCK, "IS_RANDOM": words is not None}
    launch(highest_power_kernel, num_programs(count, BLOCK), values, values, header, *noise_of, count, **constants)
    header.sub_(127).clamp_(min=0)
    launch(natural_kernel, num_programs(count, BLOCK), values, values, header, codes, *noise_of, count, **constants)
    return wire
