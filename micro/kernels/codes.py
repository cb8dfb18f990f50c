"""Compiled codecs for contiguous float32 values on a CPU; messages may have any alignment.

Each makes one pass over the values, on the rank's threads, one cached block at a time.
"""

from typing import Any

import numpy as np
from torch import Tensor

from micro.kernels.code import Code, Kind
from micro.kernels.code_blocks import read_block, write_block
from micro.kernels.cpu import absorb_tile, array_of, highest_bits
from micro.kernels.floats import converts_halves
from micro.kernels.jit import INFINITY_BITS, as_bits, jitted
from micro.kernels.threads import in_parts
from micro.values.randomness import words

Key = tuple[int, ...]  # see micro.codecs.base
Array = Any  # np.ndarray, whose types numba does not know
MANTISSA_BITS = (1 << 23) - 1
CHUNK = 1 << 16  # values that are decoded and encoded again while they are in a near cache
_NOTHING, _NO_WEIGHT = np.empty(0, np.float32), np.float32(0)
_NO_VALUES = (_NOTHING, _NOTHING.view(np.int32), _NOTHING, _NOTHING.view(np.int32))


def serves(code: Code) -> bool:
    """Tell whether there are loops for this code: blocks fill whole bytes, and the processor converts halves."""
    return code.block % 8 == 0 and (code.kind is not Kind.HALF or converts_halves())


def encode(
    code: Code, values: Tensor, wire: Tensor, key: Key, rest: Tensor | None = None, grad: Tensor | None = None
) -> int | None:
    """Make a message; see `micro.codecs.coding.encode_`, also for what is returned."""
    x, added, left, bytes_moved = _vectors(values, rest, grad, wire)
    memory, skip, drawn = wire.numpy(), code.scale_bytes(x.size), _words(code, key)

    def work(a: int, b: int) -> tuple[int, int]:
        vectors = *_summands(x[a:b], added[a:b]), left[a:b]
        return a, int(_encode(_settings(code), vectors, _NO_WEIGHT, a, memory, skip, drawn))

    places = in_parts(work, x.size, unit=code.block, moved=bytes_moved)
    return next((start + bad for start, bad in places if bad >= 0), None)


def decode(code: Code, wires: Tensor, out: Tensor, divisor: float = 1.0) -> bool:
    """Fill ``out`` with the sum of what R messages (R, bytes) hold, divided; return whether all of it is finite."""
    target, memory = array_of(out), wires.numpy()
    settings = np.float32(divisor), code.scale_bytes(target.size)

    def work(a: int, b: int) -> int:
        return int(_decode(_settings(code), _NO_VALUES, a, memory, target[a:b], *settings))

    moved = 4 + memory.size / max(target.size, 1)
    return max(in_parts(work, target.size, unit=code.block, moved=moved)) < INFINITY_BITS


def encode_mean(
    code: Code,
    values: Tensor,
    wires: Tensor,
    wire: Tensor,
    key: Key,
    mean: Tensor,
    rest: Tensor | None = None,
    grad: Tensor | None = None,
) -> tuple[bool, int | None]:
    """Make a message of a mean; see `micro.codecs.coding.encode_mean_`, also for what is returned."""
    x, added, left, bytes_moved = _vectors(values, rest, grad, wire)
    target, others, memory, count = array_of(mean), wires.numpy(), wire.numpy(), np.float32(wires.shape[0] + 1)
    settings, skip, drawn, numel = _settings(code), code.scale_bytes(x.size), _words(code, key), x.size
    size = code.block * max(1, CHUNK // code.block)

    def work(start: int, stop: int) -> tuple[int, int]:
        first_bad, highest = numel, 0
        for a in range(start, stop, size):
            b = min(a + size, stop)
            own, out = _summands(x[a:b], added[a:b]), target[a:b]
            bad = int(_decode(settings, own, a, others, out, count, skip))
            first_bad = min(first_bad, a + bad) if bad >= 0 else first_bad
            vectors = *_summands(out, _NOTHING), left[a:b]
            highest = max(highest, int(_encode(settings, vectors, count, a, memory, skip, drawn)))
        return first_bad, highest

    moved = bytes_moved + 4 + others.size / max(numel, 1)
    bads, highest = zip(*in_parts(work, numel, unit=code.block, moved=moved), strict=True)
    return max(highest) < INFINITY_BITS, min(bads) if min(bads) < numel else None


def _vectors(
    values: Tensor, rest: Tensor | None, grad: Tensor | None, wire: Tensor
) -> tuple[Array, Array, Array, float]:
    """Return values, gradient and rest, empty where there is none, and the bytes that encoding moves for a value."""
    x, added, left = (_NOTHING if v is None else array_of(v) for v in (values, grad, rest))
    return x, added, left, 4 + 8 * (grad is not None) + 4 * (rest is not None) + wire.numel() / max(x.size, 1)


def _summands(x: Array, grad: Array) -> tuple[Array, Array, Array, Array]:
    """Return the values and the gradient, each as numbers and as bits."""
    return x, x.view(np.int32), grad, grad.view(np.int32)


def _settings(code: Code) -> tuple[int, int, int, bool]:
    return int(code.kind), code.block, code.width, code.is_published


def _words(code: Code, key: Key) -> Array:
    return np.array(words(*key) if code.kind is Kind.LEVELS else (0, 0), np.uint32)


@jitted
def _absorbed(values: Any, bits: Any, grad: Any, grad_bits: Any, start: Any, end: Any, first_bad: Any) -> Any:
    """Add the gradient from ``start`` to ``end``, where there is one; return ``first_bad``, or the first one here."""
    if grad.size == 0:
        return first_bad
    bad = absorb_tile(values[start:end], bits[start:end], grad[start:end], grad_bits[start:end])
    return start + bad if first_bad < 0 <= bad else first_bad


@jitted
def _encode(code: Any, vectors: Any, weight: Any, place: Any, wire: Any, skip: Any, words: Any) -> Any:
    """Code values into their places of a message; return where the first sum that is too large is, or -1.

    ``vectors`` are values and gradient, each with its bits, and rest. The gradient, if not empty, is added first. The
    rest, if not empty, becomes ``values - decoded``. With a ``weight`` other than zero it becomes that many times this,
    the values become what is decoded, and the bit pattern of their largest magnitude is returned.
    """
    values, bits, grad, grad_bits, rest = vectors
    block, first_bad, key = code[1], -1, (words[0], words[1])
    memory = np.empty((4, min(block, values.size)), np.float32)
    for start in range(0, values.size, block):
        end = min(start + block, values.size)
        first_bad = _absorbed(values, bits, grad, grad_bits, start, end, first_bad)
        x, near = values[start:end], memory[0, : end - start]
        write_block(code, x, bits[start:end], wire, place + start, skip, key, memory)
        if rest.size or weight:
            read_block(code, wire, place + start, skip, near, memory[3].view(np.int32))
            leave(rest[start:end], x, near, weight)
    return np.int64(first_bad) if weight == 0 else np.int64(highest_bits(bits))


@jitted
def _decode(code: Any, own: Any, place: Any, wires: Any, out: Any, divisor: Any, skip: Any) -> Any:
    """Fill ``out`` with the sum of what R messages (R, bytes) hold, and of the ``own`` values where there are some.

    The sum is divided. Its largest magnitude's bit pattern is returned; with own values, and their gradient, each as
    numbers and as bits, the place of their first sum that is too large.
    """
    block, highest, first_bad = code[1], np.int32(0), -1
    memory = np.empty((2, min(block, out.size)), np.float32)
    codes = memory[1].view(np.int32)
    for start in range(0, out.size, block):
        end = min(start + block, out.size)
        target, near = out[start:end], memory[0, : end - start]
        first_bad = _absorbed(*own, start, end, first_bad)
        for row in range(wires.shape[0]):
            if row == 0:
                read_block(code, wires[row], place + start, skip, target, codes)
            else:
                read_block(code, wires[row], place + start, skip, near, codes)
                for i in range(target.size):
                    target[i] += near[i]
        highest = max(highest, finish(target, own[0][start:end], divisor, wires.shape[0] == 0))
    return np.int64(first_bad) if own[0].size else np.int64(highest)


@jitted
def leave(rest: Any, values: Any, decoded: Any, weight: Any) -> Any:
    """Write into ``rest``, where there is one, what ``decoded`` lacks of ``values``.

    With a weight other than zero write that many times it, and ``decoded`` into ``values``.
    """
    if weight == 0:
        for i in range(rest.size):
            rest[i] = values[i] - decoded[i]
    else:
        for i in range(rest.size):
            rest[i] = weight * (values[i] - decoded[i])
        for i in range(values.size):
            values[i] = decoded[i]


@jitted
def divide(values: Any, divisor: Any) -> Any:
    """Divide the values, in place; return the bit pattern of the largest magnitude."""
    if divisor != 1 and as_bits(divisor) & np.int32(MANTISSA_BITS) == 0:  # a power of two: the same, and faster
        inverse = np.float32(np.float32(1) / divisor)
        for i in range(values.size):
            values[i] *= inverse
    elif divisor != 1:
        for i in range(values.size):
            values[i] /= divisor
    return highest_bits(values.view(np.int32))


@jitted
def finish(total: Any, values: Any, divisor: Any, is_empty: Any) -> Any:
    """Add the values, where there are any, to the sum of messages, or of none; divide it as `divide` does."""
    if is_empty:
        for i in range(values.size):
            total[i] = values[i]
    else:
        for i in range(values.size):
            total[i] += values[i]
    return divide(total, divisor)
