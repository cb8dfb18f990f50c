"""What the messages of codes of blocks stand for; `micro.kernels.triton.encoding` makes them."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.triton.launching import ALIGNED, BLOCK, kernel, launch, num_programs

TERNARY = 0  # in place of a width


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
    scales: tl.tensor,
    packed: tl.tensor,
    out: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    WIDTH: tl.constexpr,
    FLIPPED: tl.constexpr,
    LOWEST: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    levels = (_codes(packed, offsets, mask, WIDTH) ^ FLIPPED) + LOWEST
    tl.store(out + offsets, levels.to(tl.float32) * tl.load(scales + offsets // SHARED, mask=mask, other=0), mask=mask)


@kernel
def decode_levels_kernel(
    scales: tl.tensor,
    packed: tl.tensor,
    out: tl.tensor,
    numel: tl.tensor,
    WIDTH: tl.constexpr,
    FLIPPED: tl.constexpr,
    LOWEST: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write (code xor FLIPPED) + LOWEST times the scale that SHARED values have in common to ``out`` (numel,)."""
    block = tl.program_id(0)
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < tl.num_programs(0) - 1:
        offsets = block * BLOCK + lanes
        _levels(scales, packed, out, offsets, offsets < whole, WIDTH, FLIPPED, LOWEST, SHARED)
    else:
        offsets = whole + lanes
        _levels(scales, packed, out, offsets, offsets < numel, WIDTH, FLIPPED, LOWEST, SHARED)


@kernel
def _signs(
    uppers: tl.tensor,
    lowers: tl.tensor,
    packed: tl.tensor,
    out: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    FACTOR: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    negative = _codes(packed, offsets, mask, 1)
    upper = tl.load(uppers + offsets // SHARED, mask=mask, other=0)
    lower = tl.load(lowers + offsets // SHARED, mask=mask, other=0) * FACTOR
    tl.store(out + offsets, tl.where(negative == 1, lower, upper), mask=mask)


@kernel
def decode_signs_kernel(
    uppers: tl.tensor,
    lowers: tl.tensor,
    packed: tl.tensor,
    out: tl.tensor,
    numel: tl.tensor,
    FACTOR: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write FACTOR times the block's lower mean where a bit is set, else its upper one, to ``out`` (numel,)."""
    block = tl.program_id(0)
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < tl.num_programs(0) - 1:
        offsets = block * BLOCK + lanes
        _signs(uppers, lowers, packed, out, offsets, offsets < whole, FACTOR, SHARED)
    else:
        offsets = whole + lanes
        _signs(uppers, lowers, packed, out, offsets, offsets < numel, FACTOR, SHARED)


def decode_int8(wire: Tensor, count: int, *, block: int) -> Tensor:
    """Return the (count,) float32 values of a message of codec int8."""
    return _decode_levels(wire, count, block=block, width=8, flipped=128, lowest=-128)


def decode_levels(wire: Tensor, count: int, *, block: int, bits: int) -> Tensor:
    """Return the (count,) float32 values of a message of codec qsgd."""
    return _decode_levels(wire, count, block=block, width=bits, flipped=0, lowest=1 - (1 << (bits - 1)))


def decode_ternary(wire: Tensor, count: int, *, block: int) -> Tensor:
    """Return the (count,) float32 values of a message of codec terngrad."""
    return _decode_levels(wire, count, block=block, width=TERNARY, flipped=0, lowest=-1)


def decode_signs(wire: Tensor, count: int, *, block: int, has_two: bool) -> Tensor:
    """Return the (count,) float32 values of a message of codec onebit (``has_two``) or sign."""
    scales, packed, out = _parted(wire, count, (1 + has_two) * -(-count // block))
    uppers, lowers = scales.chunk(2) if has_two else (scales, scales)
    constants = {"FACTOR": 1.0 if has_two else -1.0, "SHARED": block}
    _launch(decode_signs_kernel, uppers, lowers, packed, out, count, **constants)
    return out


def _decode_levels(wire: Tensor, count: int, *, block: int, width: int, flipped: int, lowest: int) -> Tensor:
    scales, packed, out = _parted(wire, count, -(-count // block))
    constants = {"WIDTH": width, "FLIPPED": flipped, "LOWEST": lowest, "SHARED": block}
    _launch(decode_levels_kernel, scales, packed, out, count, **constants)
    return out


def _parted(wire: Tensor, count: int, num_scales: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales and the bytes of a message, and memory for its values."""
    out = torch.empty(count, dtype=torch.float32, device=wire.device)
    return wire[: 4 * num_scales].view(torch.float32), wire[4 * num_scales :], out


def _launch(function: Any, *arguments: Any, **constants: Any) -> None:
    out, count = arguments[-2:]
    launch(function, num_programs(count, BLOCK), out, *arguments, ALIGNED=ALIGNED, BLOCK=BLOCK, **constants)
