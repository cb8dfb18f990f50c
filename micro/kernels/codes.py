"""The compiled codes as functions of tensors: contiguous float32 values on a CPU, bytes of the wire at any address.

Every function fills a whole message in one pass over the values, or adds up R messages, ``wires`` (R, bytes), in one.
``rest``, where there is one, gets what the code leaves of the values, or ``weight`` times that added to it; it may be
the values' own memory. ``words`` are the two that `micro.randomness.words` makes of a key; None: nothing is random.
"""

import numpy as np
import torch
from torch import Tensor

from micro.kernels import blockwise, casts, packing

Words = tuple[int, int]
_NOTHING = np.empty(0, np.float32)


class Rest:
    """Where what a code leaves of its values goes."""

    __slots__ = ("vector", "weight")

    def __init__(self, vector: Tensor | None, weight: float) -> None:
        self.vector = _NOTHING if vector is None else vector.detach().numpy()
        self.weight = np.float32(weight)


def encode_cast(values: Tensor, wire: Tensor, rest: Rest, *, is_half: bool) -> None:
    """Fill ``wire`` as codecs half and bfloat16 have it."""
    x = values.detach().numpy()
    casts.encode_cast(x, x.view(np.int32), wire.numpy(), rest.vector, rest.weight, is_half)


def decode_cast(wires: Tensor, out: Tensor, divisor: float, *, is_half: bool) -> None:
    """Fill ``out`` with the sum of R messages, divided."""
    casts.decode_cast(wires.numpy(), out.detach().numpy(), np.float32(divisor), is_half)


def encode_natural(values: Tensor, wire: Tensor, rest: Rest, words: Words | None) -> None:
    """Fill ``wire`` as codec natural has it."""
    x, noise = values.detach().numpy(), _noise(words)
    bits = x.view(np.int32)
    below = np.int32(max(casts.highest_power(bits, *noise) - casts.NUM_POWERS, 0))
    packed = _after_header(wire, np.array([below]))
    casts.encode_natural(x, bits, packed, rest.vector, rest.weight, below, *noise)


def decode_natural(wires: Tensor, out: Tensor, divisor: float) -> None:
    """Fill ``out`` with the sum of R messages, divided."""
    belows = _header(wires, 1).view(torch.int32).view(-1).numpy()
    casts.decode_natural(belows, wires.numpy(), 4, out.detach().numpy(), np.float32(divisor))


def encode_int8(values: Tensor, wire: Tensor, rest: Rest, words: Words | None, *, block: int) -> None:
    """Fill ``wire`` as codec int8 has it."""
    x, scales = values.detach().numpy(), _scales(values, block)
    codes = wire.numpy()[scales.nbytes :].view(np.int8)
    blockwise.encode_int8(x, x.view(np.int32), scales, codes, rest.vector, rest.weight, block, *_noise(words))
    _after_header(wire, scales)


def decode_int8(wires: Tensor, out: Tensor, divisor: float, *, block: int) -> None:
    """Fill ``out`` with the sum of R messages, divided."""
    scales = _scales_of(wires, out, block)
    codes = wires.view(torch.int8).numpy()
    blockwise.decode_int8(scales, codes, scales[0].nbytes, out.detach().numpy(), np.float32(divisor), block)


def encode_levels(
    values: Tensor, wire: Tensor, rest: Rest, words: Words, *, block: int, bits: int, is_least_squares: bool
) -> None:
    """Fill ``wire`` as codec qsgd has it."""
    x, scales = values.detach().numpy(), _scales(values, block)
    packed, group = wire.numpy()[scales.nbytes :], blockwise.group_size(block)
    places = (x, x.view(np.int32), scales, packed, rest.vector, rest.weight)
    blockwise.encode_levels(*places, block, group, bits, is_least_squares, *_noise(words)[1:])
    _after_header(wire, scales)


def decode_levels(wires: Tensor, out: Tensor, divisor: float, *, block: int, bits: int) -> None:
    """Fill ``out`` with the sum of R messages, divided."""
    _decode_levels(wires, out, divisor, block, bits, 1 - (1 << (bits - 1)))


def encode_ternary(
    values: Tensor, wire: Tensor, rest: Rest, words: Words, *, block: int, clip: float | None, is_least_squares: bool
) -> None:
    """Fill ``wire`` as codec terngrad has it."""
    x, scales = values.detach().numpy(), _scales(values, block)
    packed, group = wire.numpy()[scales.nbytes :], blockwise.group_size(block)
    places = (x, x.view(np.int32), scales, packed, rest.vector, rest.weight)
    blockwise.encode_ternary(*places, block, group, np.float32(clip or 0), is_least_squares, *_noise(words)[1:])
    _after_header(wire, scales)


def decode_ternary(wires: Tensor, out: Tensor, divisor: float, *, block: int) -> None:
    """Fill ``out`` with the sum of R messages, divided."""
    _decode_levels(wires, out, divisor, block, blockwise.TERNARY, -1)


def encode_signs(values: Tensor, wire: Tensor, rest: Rest, *, block: int, has_two: bool) -> None:
    """Fill ``wire`` as codecs sign, with a mean for each block, and onebit, with two, have it."""
    scales = np.stack([_scales(values, block)] * (2 if has_two else 1))
    packed, group = wire.numpy()[scales.nbytes :], blockwise.group_size(block)
    x = values.detach().numpy()
    blockwise.encode_signs(x, scales, packed, rest.vector, rest.weight, block, group, has_two)
    _after_header(wire, scales)


def decode_signs(wires: Tensor, out: Tensor, divisor: float, *, block: int, has_two: bool) -> None:
    """Fill ``out`` with the sum of R messages, divided."""
    num_blocks = -(-out.numel() // block)
    scales = _header(wires, (1 + has_two) * num_blocks).view(torch.float32).numpy()
    uppers = np.ascontiguousarray(scales[:, :num_blocks])
    lowers = np.ascontiguousarray(scales[:, num_blocks:]) if has_two else -uppers
    skip, group = scales[0].nbytes, blockwise.group_size(block)
    blockwise.decode_signs(uppers, lowers, wires.numpy(), skip, out.detach().numpy(), np.float32(divisor), block, group)


def pack(codes: Tensor, width: int, packed: Tensor) -> None:
    """Fill ``packed`` as `micro.bits.pack` has it."""
    packing.pack_codes(codes.to(torch.int32).contiguous().numpy(), width, packed.numpy())


def unpack(packed: Tensor, width: int, codes: Tensor) -> None:
    """Fill ``codes`` (count,), int32 or int64, as `micro.bits.unpack` has them."""
    packing.unpack_codes(packed.contiguous().numpy(), width, codes.numpy())


def put_places(places: Tensor, low: int, gap: int, lows: Tensor, highs: Tensor) -> None:
    """Fill ``lows`` and ``highs`` as `micro.index_codecs` has them of ascending places."""
    packing.put_places(places.contiguous().numpy(), low, gap, lows.numpy(), highs.numpy())


def get_places(lows: Tensor, highs: Tensor, low: int, gap: int, places: Tensor) -> None:
    """Fill ``places`` with what `put_places` put down."""
    packing.get_places(lows.numpy(), highs.numpy(), low, gap, places.numpy())


def _decode_levels(wires: Tensor, out: Tensor, divisor: float, block: int, width: int, lowest: int) -> None:
    scales, group = _scales_of(wires, out, block), blockwise.group_size(block)
    target, skip = out.detach().numpy(), scales[0].nbytes
    blockwise.decode_levels(
        scales, wires.numpy(), skip, target, np.float32(divisor), block, group, width, np.int32(lowest)
    )


def _noise(words: Words | None) -> tuple[bool, np.uint32, np.uint32]:
    first, second = words or (0, 0)
    return words is not None, np.uint32(first), np.uint32(second)


def _scales(values: Tensor, block: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.empty(-(-values.numel() // block), np.float32)


def _after_header(wire: Tensor, header: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> np.ndarray:
    """Put ``header`` at the beginning of ``wire``; return the bytes after it."""
    wire.numpy()[: header.nbytes] = header.reshape(-1).view(np.uint8)
    return wire.numpy()[header.nbytes :]


def _header(wires: Tensor, num_words: int) -> Tensor:
    """Return the first words of 4 bytes of every message (R, 4 num_words) uint8, at a place where they may be read."""
    return wires[:, : 4 * num_words].clone(memory_format=torch.contiguous_format)


def _scales_of(wires: Tensor, out: Tensor, block: int) -> np.ndarray:
    return _header(wires, -(-out.numel() // block)).view(torch.float32).numpy()
