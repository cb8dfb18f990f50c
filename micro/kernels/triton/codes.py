"""The codes as functions of tensors, as `micro.kernels.codes` has them: contiguous float32 values on a GPU.

A codec gives an `Encoding` of a message, or a `Decoding` of R messages, ``wires`` (R, bytes); None where there is no
kernel for its settings. The bytes are those of the other forms. The host reads nothing, but for where a gradient
that is added on the way is not finite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from micro.health import index_of
from micro.kernels.triton import decoding, encoding
from micro.kernels.triton.absorbing import absorb_
from micro.kernels.triton.encoding import Words, serves


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the sum of messages is read, divided.

    Attributes:
        run: fills ``out`` with that, or with ``x`` less the one message; returns whether all is finite.
    """

    run: Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a message is made.

    Attributes:
        wire: the bytes.
        run: fills bytes, which begin at a multiple of 4, with the message of values.
        inverse: how it is read.
    """

    wire: Tensor
    run: Callable[[Tensor, Tensor], None]
    inverse: Decoding


@dataclass(frozen=True, slots=True)
class Values:
    """A message's values; see `micro.codecs.base.Codec.encode_into_`."""

    x: Tensor
    rest: Tensor | None
    grad: Tensor | None

    @classmethod
    def of(cls, values: Tensor, rest: Tensor | None, grad: Tensor | None) -> "Values":
        """Return all values of a message."""
        return cls(values.detach(), rest, grad)


def encode(encoding: Encoding, values: Values) -> int | None:
    """Make a message; return the index of the first sum with the gradient that is too large, None where none is."""
    first_bad = None if values.grad is None else index_of(absorb_(values.x, values.grad), values.x.numel())
    wire = encoding.wire
    message = torch.empty_like(wire) if wire.storage_offset() % 4 else wire
    encoding.run(values.x, message)
    if message is not wire:
        wire.copy_(message)
    if values.rest is not None:
        encoding.inverse.run(values.rest, values.x)
    return first_bad


def decode(decoding: Decoding, out: Tensor) -> Tensor:
    """Fill ``out``; return whether all of it is finite, () bool."""
    return decoding.run(out, None)


def encode_cast(wire: Tensor, *, is_half: bool) -> Encoding:
    """Return how codecs half and bfloat16 are made."""
    return Encoding(wire, partial(encoding.cast, is_half=is_half), decode_cast(wire[None], 1.0, is_half=is_half))


def decode_cast(wires: Tensor, divisor: float, *, is_half: bool) -> Decoding:
    """Return how they are read."""
    kind = decoding.HALF if is_half else decoding.BFLOAT16

    def run(out: Tensor, x: Tensor | None) -> Tensor:
        rows = wires[0, : 2 * out.numel()][None] if len(wires) == 1 else wires[:, : 2 * out.numel()]
        is_even = rows.storage_offset() % 2 == rows.stride(0) % 2 == 0
        codes = (rows if is_even else rows.clone(memory_format=torch.contiguous_format)).view(torch.int16)
        return decoding.decode(kind, out[None], codes, out, divisor=divisor, x=x)

    return Decoding(run)


def encode_int8(wire: Tensor, count: int, words: Words | None, *, block: int) -> Encoding | None:
    """Return how codec int8 is made."""
    if not serves(block):
        return None
    run = partial(encoding.int8, words=words, block=block)
    return Encoding(wire, run, decode_int8(wire[None], count, 1.0, block=block))


def decode_int8(wires: Tensor, count: int, divisor: float, *, block: int) -> Decoding:
    """Return how it is read."""
    return _decoding(decoding.INT8, wires, count, divisor, block)


def encode_signs(wire: Tensor, count: int, *, block: int) -> Encoding | None:
    """Return how codec sign is made."""
    if not serves(block):
        return None
    run = partial(encoding.signs, block=block)
    return Encoding(wire, run, decode_signs(wire[None], count, 1.0, block=block))


def decode_signs(wires: Tensor, count: int, divisor: float, *, block: int) -> Decoding:
    """Return how it is read."""
    return _decoding(decoding.SIGNS, wires, count, divisor, block)


def _decoding(kind: int, wires: Tensor, count: int, divisor: float, block: int) -> Decoding:
    """Return how messages are read that begin with a scale for each block."""
    length = 4 * -(-count // block)

    def run(out: Tensor, x: Tensor | None) -> Tensor:
        scales = wires[:, :length].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return decoding.decode(kind, scales, wires[:, length:], out, shared=block, divisor=divisor, x=x)

    return Decoding(run)
