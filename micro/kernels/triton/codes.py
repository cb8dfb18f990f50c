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

from micro.kernels.triton import casting, decoding, encoding
from micro.kernels.triton.absorbing import absorb_
from micro.kernels.triton.blockwise import serves
from micro.kernels.triton.encoding import Words

WIDTHS = (1, 2, 4, 8)  # bits of codes that fill whole bytes


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
    inverse: Decoding | None


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
    first_bad = None if values.grad is None else absorb_(values.x, values.grad)
    wire = encoding.wire
    message = torch.empty_like(wire) if wire.storage_offset() % 4 else wire
    encoding.run(values.x, message)
    if message is not wire:
        wire.copy_(message)
    if values.rest is not None and encoding.inverse is not None:
        encoding.inverse.run(values.rest, values.x)
    return first_bad


def decode(decoding: Decoding, out: Tensor) -> Tensor:
    """Fill ``out``; return whether all of it is finite, () bool."""
    return decoding.run(out, None)


def encode_cast(wire: Tensor, *, is_half: bool) -> Encoding:
    """Return how codecs half and bfloat16 are made."""
    return Encoding(wire, partial(casting.cast, is_half=is_half), decode_cast(wire[None], 1.0, is_half=is_half))


def decode_cast(wires: Tensor, divisor: float, *, is_half: bool) -> Decoding:
    """Return how they are read."""

    def run(out: Tensor, x: Tensor | None) -> Tensor:
        rows = wires[0, : 2 * out.numel()][None] if len(wires) == 1 else wires[:, : 2 * out.numel()]
        is_even = rows.storage_offset() % 2 == rows.stride(0) % 2 == 0
        codes = (rows if is_even else rows.clone(memory_format=torch.contiguous_format)).view(torch.int16)
        return decoding.decode(decoding.CAST, out[None], codes, out, (is_half,), divisor=divisor, x=x)

    return Decoding(run)


def encode_natural(wire: Tensor, words: Words | None) -> Encoding:
    """Return how codec natural is made."""
    return Encoding(wire, partial(casting.natural, words=words), decode_natural(wire[None], 1.0))


def decode_natural(wires: Tensor, divisor: float) -> Decoding:
    """Return how it is read."""
    return _decoding(decoding.NATURAL, wires, 1, (), divisor)


def encode_int8(wire: Tensor, count: int, words: Words | None, *, block: int) -> Encoding | None:
    """Return how codec int8 is made."""
    if not serves(block):
        return None
    run = partial(encoding.int8, words=words, block=block)
    return Encoding(wire, run, decode_int8(wire[None], count, 1.0, block=block))


def decode_int8(wires: Tensor, count: int, divisor: float, *, block: int) -> Decoding:
    """Return how it is read."""
    return _decoding(decoding.LEVELS, wires, -(-count // block), (8, 128, -128, block), divisor)


def encode_levels(
    wire: Tensor, count: int, words: Words, *, block: int, bits: int, is_least_squares: bool
) -> Encoding | None:
    """Return how codec qsgd is made."""
    if not serves(block) or bits not in WIDTHS:
        return None
    run = partial(encoding.levels, words=words, block=block, bits=bits, is_least_squares=is_least_squares)
    return Encoding(wire, run, decode_levels(wire[None], count, 1.0, block=block, bits=bits))


def decode_levels(wires: Tensor, count: int, divisor: float, *, block: int, bits: int) -> Decoding | None:
    """Return how it is read."""
    if bits not in WIDTHS:
        return None
    settings = (bits, 0, 1 - (1 << (bits - 1)), block)
    return _decoding(decoding.LEVELS, wires, -(-count // block), settings, divisor)


def encode_ternary(
    wire: Tensor, count: int, words: Words, *, block: int, clip: float | None, is_least_squares: bool
) -> Encoding | None:
    """Return how codec terngrad is made."""
    if not serves(block) or clip is None:
        return None
    run = partial(encoding.ternary, words=words, block=block, clip=clip, is_least_squares=is_least_squares)
    return Encoding(wire, run, decode_ternary(wire[None], count, 1.0, block=block))


def decode_ternary(wires: Tensor, count: int, divisor: float, *, block: int) -> Decoding:
    """Return how it is read."""
    return _decoding(decoding.LEVELS, wires, -(-count // block), (decoding.TERNARY, 0, -1, block), divisor)


def encode_range_float(wire: Tensor, count: int, *, width: int, mantissa: int | None, fewest: int) -> None:
    """Return None: torch makes this code."""


def decode_range_float(wires: Tensor, divisor: float, *, width: int) -> None:
    """Return None: torch reads this code."""


def encode_signs(wire: Tensor, count: int, *, block: int, has_two: bool) -> Encoding | None:
    """Return how codecs sign, with a mean for each block, and onebit, with two, are made."""
    if not serves(block):
        return None
    run = partial(encoding.signs, block=block, has_two=has_two)
    return Encoding(wire, run, decode_signs(wire[None], count, 1.0, block=block, has_two=has_two))


def decode_signs(wires: Tensor, count: int, divisor: float, *, block: int, has_two: bool) -> Decoding:
    """Return how they are read."""
    kind = decoding.MEANS if has_two else decoding.SIGNS
    return _decoding(kind, wires, (1 + has_two) * -(-count // block), (block,), divisor, num_kinds=1 + has_two)


def _decoding(
    kind: int, wires: Tensor, num_scales: int, settings: tuple[int, ...], divisor: float, *, num_kinds: int = 1
) -> Decoding:
    """Return how messages are read that begin with ``num_scales``, all of a kind before those of the next."""

    def run(out: Tensor, x: Tensor | None) -> Tensor:
        kinds = wires[:, : 4 * num_scales].clone(memory_format=torch.contiguous_format).view(torch.float32)
        scales = kinds.view(len(kinds), num_kinds, -1).transpose(1, 2).contiguous()
        return decoding.decode(kind, scales, wires[:, 4 * num_scales :], out, settings, divisor=divisor, x=x)

    return Decoding(run)
