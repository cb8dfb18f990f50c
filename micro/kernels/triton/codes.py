"""The codes as functions of tensors, as `micro.kernels.codes` has them: contiguous float32 values on a GPU.

The bytes are those of the other forms. The host reads nothing, but for where a gradient that is added on the way is
not finite.
"""

import torch
from torch import Tensor

from micro.kernels.code import Code, Kind
from micro.kernels.triton import decoding, encoding
from micro.kernels.triton.absorbing import absorb_
from micro.values.finite import index_of

SMALLEST_BLOCK = 16


def serves(code: Code) -> bool:
    """Tell whether there are kernels for this code, with blocks of a power of 2, neither short nor beyond a tile."""
    block = code.block
    return code.kind <= Kind.SIGN and block & (block - 1) == 0 and SMALLEST_BLOCK <= block <= encoding.TILE


def encode(
    code: Code,
    values: Tensor,
    wire: Tensor,
    key: tuple[int, ...],
    rest: Tensor | None = None,
    grad: Tensor | None = None,
) -> int | None:
    """Make a message; see `micro.codecs.coding.encode_`, also for what is returned."""
    x = values.detach()
    first_bad = None if grad is None else index_of(absorb_(x, grad), x.numel())
    message = torch.empty_like(wire) if wire.storage_offset() % 4 else wire
    scales, codes = message.split([code.scale_bytes(x.numel()), message.numel() - code.scale_bytes(x.numel())])
    if code.kind is Kind.INT8:
        encoding.int8(x, scales.view(torch.float32), codes.view(torch.int8), block=code.block)
    elif code.kind is Kind.SIGN:
        encoding.signs(x, scales.view(torch.float32), codes, block=code.block)
    else:
        encoding.cast(x, codes.view(torch.int16), is_half=code.kind is Kind.HALF)
    if message is not wire:
        wire.copy_(message)
    if rest is not None:
        decoded = torch.empty_like(x)
        decode(code, wire[None], decoded)
        torch.sub(x, decoded, out=rest)
    return first_bad


def decode(code: Code, wires: Tensor, out: Tensor, divisor: float = 1.0) -> Tensor:
    """Fill ``out`` with the sum of what R messages hold, divided; return whether all of it is finite, () bool."""
    if code.kind in (Kind.INT8, Kind.SIGN):
        length = code.scale_bytes(out.numel())
        scales = wires[:, :length].clone(memory_format=torch.contiguous_format).view(torch.float32)
        codes = wires[:, length:]
    else:
        codes = wires[0, : 2 * out.numel()][None] if len(wires) == 1 else wires[:, : 2 * out.numel()]
        is_even = codes.storage_offset() % 2 == codes.stride(0) % 2 == 0
        codes = (codes if is_even else codes.clone(memory_format=torch.contiguous_format)).view(torch.int16)
        scales = out[None]
    return decoding.decode(int(code.kind), scales, codes, out, shared=code.block, divisor=divisor)
