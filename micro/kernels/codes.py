"""The compiled codes as functions of tensors: contiguous float32 values on a CPU, bytes of the wire at any address.

A codec gives an `Encoding` of a message, or a `Decoding` of R messages, ``wires`` (R, bytes). `encode`, `decode` and
`encode_mean` run them in one pass over the values, on the threads that the rank has. ``words`` are the two that
`micro.randomness.words` makes of a key; None: nothing is random.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels import blockwise, casts, ranges, signs
from micro.kernels.jit import INFINITY_BITS
from micro.kernels.threads import in_parts
from micro.kernels.tiles import NEAR

Words = tuple[int, int]
Array = Any  # np.ndarray, whose types numba does not know
CHUNK = 1 << 16  # values that are decoded and encoded again while they are in a near cache
_NOTHING, _PLAIN = np.empty(0, np.float32), np.float32(0)


@dataclass(frozen=True, slots=True)
class Values:
    """A part of a message's values: a slice of each vector, the gradient and the rest empty where there are none.

    ``weight`` is that of `micro.kernels.casts`.
    """

    x: Array
    grad: Array
    rest: Array
    weight: Any = _PLAIN

    @classmethod
    def of(cls, values: Tensor, rest: Tensor | None, grad: Tensor | None) -> "Values":
        """Return all values of a message; see `micro.codecs.base.Codec.encode_into_`."""
        x, added, left = (_NOTHING if v is None else v.detach().numpy() for v in (values, grad, rest))
        return cls(x, added, left)

    def part(self, start: int, stop: int) -> "Values":
        """Return the values from ``start`` to ``stop``."""
        return Values(self.x[start:stop], self.grad[start:stop], self.rest[start:stop], self.weight)

    @property
    def bytes_to_add(self) -> int:
        """Bytes that are moved for each value to read it, with its gradient where it is added."""
        return 12 if self.grad.size else 4

    @property
    def bytes_to_leave(self) -> int:
        """Bytes that are moved for each value to write what is left."""
        return 4 if self.rest.size else 0

    @property
    def summands(self) -> tuple[Array, Array, Array, Array]:
        """The values and the gradient, each as numbers and as bits."""
        return self.x, self.x.view(np.int32), self.grad, self.grad.view(np.int32)

    @property
    def all(self) -> tuple[Array, ...]:
        """What most loops take first."""
        return *self.summands, self.rest, self.weight

    @property
    def settled(self) -> tuple[Array, ...]:
        """What a loop takes first to whose values the gradient was added before."""
        return self.x, self.x.view(np.int32), self.rest, self.weight


_NONE = Values(_NOTHING, _NOTHING, _NOTHING)


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a message is made.

    Attributes:
        size: bytes of the message.
        run: encodes a part of the values, which begins at a multiple of ``unit``; returns the place in the part of the
            first sum with the gradient that is too large, or -1. With a weight it returns the bit pattern of the
            largest magnitude that is decoded.
        look: sees all parts before ``run`` does, and adds the gradient in its place; returns that and what it found.
        settle: gets what ``look`` found of all parts.
    """

    unit: int
    size: int
    run: Callable[[Values, int], int]
    look: Callable[[Values, int], tuple[int, int]] | None = None
    settle: Callable[[list[int]], None] | None = None


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the sum of messages is read, divided.

    Attributes:
        size: bytes of the messages.
        run: fills a part of an array, which begins at a multiple of ``unit``; returns the bit pattern of the largest
            magnitude. With values of this part that were not sent, it adds them, and returns as for an Encoding.
    """

    unit: int
    size: int
    run: Callable[[Array, int, Values], int]


def encode(encoding: Encoding, values: Values) -> int | None:
    """Make a message; return the index of the first sum with the gradient that is too large, None where none is."""
    numel, first_bad = values.x.size, None
    if encoding.look is not None and encoding.settle is not None:
        look = encoding.look
        moved = values.bytes_to_add
        looked = in_parts(lambda a, b: (a, *look(values.part(a, b), a)), numel, unit=encoding.unit, moved=moved)
        encoding.settle([found for _, _, found in looked])
        first_bad = next((start + bad for start, bad, _ in looked if bad >= 0), None)
        values = Values(values.x, _NOTHING, values.rest, values.weight)
    moved = values.bytes_to_add + values.bytes_to_leave + encoding.size / max(numel, 1)
    places = in_parts(lambda a, b: (a, int(encoding.run(values.part(a, b), a))), numel, unit=encoding.unit, moved=moved)
    return next((start + bad for start, bad in places if bad >= 0), first_bad)


def decode(decoding: Decoding, out: Tensor) -> bool:
    """Fill ``out``; return whether all of it is finite."""
    target = out.detach().numpy()
    moved, unit = 4 + decoding.size / max(target.size, 1), decoding.unit
    highest = in_parts(lambda a, b: int(decoding.run(target[a:b], a, _NONE)), target.size, unit=unit, moved=moved)
    return max(highest) < INFINITY_BITS


def encode_mean(
    encoding: Encoding, decoding: Decoding, values: Values, mean: Tensor, count: int
) -> tuple[bool, int | None]:
    """Make a message of the mean that ``decoding`` reads with the values, which is of ``count`` vectors.

    Args:
        values: their rest becomes ``count`` times what the message lacks of the mean.
        mean: (numel,) becomes what the message stands for; it may be the gradient's memory.

    Returns:
        whether that is finite; the index of the first sum with the gradient that is too large, None where none is.
    """
    target, weight, numel = mean.detach().numpy(), np.float32(count), mean.numel()

    def add_up(start: int, stop: int) -> int:
        bad = int(decoding.run(target[start:stop], start, values.part(start, stop)))
        return start + bad if bad >= 0 else numel

    def settled(start: int, stop: int) -> Values:
        return Values(target[start:stop], _NOTHING, values.rest[start:stop], weight)

    def work(start: int, stop: int) -> tuple[int, int]:
        bad, highest = numel, 0
        for a in range(start, stop, size):
            b = min(a + size, stop)
            bad = min(bad, add_up(a, b))
            highest = max(highest, int(encoding.run(settled(a, b), a)))
        return bad, highest

    size = encoding.unit * max(1, CHUNK // encoding.unit)
    bads: Sequence[int]
    found: Sequence[int]
    unit, to_add = encoding.unit, values.bytes_to_add + 4 + decoding.size / max(numel, 1)
    to_encode = values.bytes_to_leave + encoding.size / max(numel, 1)
    if encoding.look is None or encoding.settle is None:
        bads, found = zip(*in_parts(work, numel, unit=unit, moved=to_add + to_encode), strict=True)
    else:
        look = encoding.look
        bads = in_parts(add_up, numel, unit=unit, moved=to_add)
        encoding.settle(in_parts(lambda a, b: look(settled(a, b), a)[1], numel, unit=unit))
        found = in_parts(lambda a, b: int(encoding.run(settled(a, b), a)), numel, unit=unit, moved=8 + to_encode)
    return max(found) < INFINITY_BITS, min(bads) if min(bads) < numel else None


def encode_cast(wire: Tensor, *, is_half: bool) -> Encoding:
    """Return how codecs half and bfloat16 are made."""
    return _encoding(casts.encode_cast, NEAR, wire, wire.numpy(), is_half)


def decode_cast(wires: Tensor, divisor: float, *, is_half: bool) -> Decoding:
    """Return how they are read."""
    return _decoding(casts.decode_cast, NEAR, wires, divisor, is_half)


def encode_int8(wire: Tensor, count: int, words: Words | None, *, block: int) -> Encoding:
    """Return how codec int8 is made."""
    group = blockwise.group_size(block)
    return _encoding(blockwise.encode_int8, group, wire, *_parted(wire, count, block), block, group, *_noise(words))


def decode_int8(wires: Tensor, count: int, divisor: float, *, block: int) -> Decoding:
    """Return how it is read."""
    group = blockwise.group_size(block)
    return _decoding(blockwise.decode_int8, group, wires, divisor, _skipped(count, block), block, group)


def encode_levels(wire: Tensor, count: int, words: Words, *, block: int, bits: int, is_least_squares: bool) -> Encoding:
    """Return how codec qsgd is made."""
    group = blockwise.group_size(block, blockwise.BITS)
    settings = block, group, bits, is_least_squares, *_noise(words)[1:]
    return _encoding(blockwise.encode_levels, group, wire, *_parted(wire, count, block), *settings)


def decode_levels(wires: Tensor, count: int, divisor: float, *, block: int, bits: int) -> Decoding:
    """Return how it is read."""
    group = blockwise.group_size(block, blockwise.BITS)
    return _decoding(blockwise.decode_levels, group, wires, divisor, _skipped(count, block), block, group, bits)


def encode_ternary(
    wire: Tensor, count: int, words: Words, *, block: int, clip: float | None, is_least_squares: bool
) -> Encoding:
    """Return how codec terngrad is made."""
    group = blockwise.group_size(block, blockwise.DIGITS)
    settings = block, group, np.float32(clip or 0), is_least_squares, *_noise(words)[1:]
    return _encoding(blockwise.encode_ternary, group, wire, *_parted(wire, count, block), *settings)


def decode_ternary(wires: Tensor, count: int, divisor: float, *, block: int) -> Decoding:
    """Return how it is read."""
    group = blockwise.group_size(block, blockwise.DIGITS)
    return _decoding(blockwise.decode_ternary, group, wires, divisor, _skipped(count, block), block, group)


def encode_signs(wire: Tensor, count: int, *, block: int, has_two: bool = False) -> Encoding:
    """Return how codecs sign, with a mean for each block, and onebit, with two, are made."""
    group = blockwise.group_size(block, blockwise.BITS)
    uppers, rest = _parted(wire, count, block)
    lowers, packed = (rest[: uppers.size], rest[uppers.size :]) if has_two else (rest[:0], rest)
    return _encoding(signs.encode_signs, group, wire, uppers, lowers, packed, block, group, has_two)


def decode_signs(wires: Tensor, count: int, divisor: float, *, block: int, has_two: bool = False) -> Decoding:
    """Return how they are read."""
    group, num_blocks = blockwise.group_size(block, blockwise.BITS), -(-count // block)
    return _decoding(signs.decode_signs, group, wires, divisor, num_blocks, block, group, has_two)


def encode_natural(wire: Tensor, words: Words | None) -> Encoding:
    """Return how codec natural is made."""
    noise, header, codes = _noise(words), wire.numpy()[:4], wire.numpy()[4:]
    below = np.zeros(1, np.int32)

    def look(values: Values, start: int) -> tuple[int, int]:
        found: tuple[int, int] = casts.highest_power(*values.summands, start, *noise)
        return found

    def settle(highest: list[int]) -> None:
        below[0] = max(max(highest) - casts.NUM_POWERS, 0)
        header[:] = below.view(np.uint8)

    def run(values: Values, start: int) -> int:
        return int(casts.encode_natural(*values.settled, start, codes, below[0], *noise))

    return Encoding(NEAR, wire.numel(), run, look, settle)


def decode_natural(wires: Tensor, divisor: float) -> Decoding:
    """Return how it is read."""
    return _decoding(casts.decode_natural, NEAR, wires, divisor, _first_words(wires))


def encode_range_float(wire: Tensor, count: int, *, width: int, mantissa: int | None, fewest: int) -> Encoding:
    """Return how codec range_float is made; ``mantissa`` None: the best from ``fewest`` on, found on a sample."""
    packed, header, form = wire.numpy()[4:], wire.numpy()[:4], np.zeros(2, np.int32)
    stride = max(1, count // ranges.SAMPLE)
    sample = np.empty(-(-count // stride), np.float32)

    def look(values: Values, start: int) -> tuple[int, int]:
        found: tuple[int, int] = ranges.look(*values.summands)
        chosen = values.x[-start % stride :: stride]
        first = -(-start // stride)
        sample[first : first + chosen.size] = chosen
        return found

    def settle(highest: list[int]) -> None:
        largest = np.int32(max(highest))
        best = ranges.best_mantissa(sample, largest, width, fewest) if mantissa is None else mantissa
        form[:] = ranges.base_of(largest, width, best), best
        header[:] = np.array([form[0] << 5 | form[1]], np.int32).view(np.uint8)

    def run(values: Values, start: int) -> int:
        return int(ranges.encode(*values.settled, start, packed, width, *form))

    return Encoding(NEAR, wire.numel(), run, look, settle)


def decode_range_float(wires: Tensor, divisor: float, *, width: int) -> Decoding:
    """Return how it is read."""
    headers = _first_words(wires)
    return _decoding(ranges.decode, NEAR, wires, divisor, headers >> 5, headers & 31, width)


def _encoding(loop: Callable[..., Any], unit: int, wire: Tensor, *settings: Any) -> Encoding:
    """Return how a message is made by a loop over parts of the values, each with its start."""
    return Encoding(unit, wire.numel(), lambda values, start: int(loop(*values.all, start, *settings)))


def _decoding(loop: Callable[..., Any], unit: int, wires: Tensor, divisor: float, *settings: Any) -> Decoding:
    """Return how messages are read by a loop over parts of the values, each with its start."""
    codes, count = wires.numpy(), np.float32(divisor)
    return Decoding(unit, codes.size, lambda out, start, own: loop(own.summands, start, codes, out, count, *settings))


def _noise(words: Words | None) -> tuple[bool, np.uint32, np.uint32]:
    first, second = words or (0, 0)
    return words is not None, np.uint32(first), np.uint32(second)


def _skipped(count: int, block: int) -> int:
    """Return the bytes of a scale for each block."""
    return 4 * -(-count // block)


def _parted(wire: Tensor, count: int, block: int) -> tuple[Array, Array]:
    """Return the bytes of a scale for each block, and those after them."""
    whole, length = wire.numpy(), _skipped(count, block)
    return whole[:length], whole[length:]


def _first_words(wires: Tensor) -> Array:
    """Return the int32 (R,) with which each message begins, at any address."""
    return wires[:, :4].clone(memory_format=torch.contiguous_format).view(torch.int32).view(-1).numpy()
