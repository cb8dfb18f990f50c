"""The compiled codes as functions of tensors: contiguous float32 values on a CPU, bytes of the wire at any address.

Each runs in one pass over the values, on the threads that the rank has.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from micro.codecs.messages import Messages
from micro.kernels import code_blocks, coding
from micro.kernels.absorbing import absorb_
from micro.kernels.code import Code, Kind
from micro.kernels.floats import converts_halves
from micro.kernels.jit import INFINITY_BITS
from micro.kernels.threads import are_few, in_parts, lists_in_parts
from micro.values.randomness import words

Key = tuple[int, ...]  # see micro.codecs.base
Array = Any  # np.ndarray, whose types numba does not know
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
    memory, skip, drawn, found = wire.numpy(), code.scale_bytes(x.size), _words(code, key), None
    if code.has_header:
        found, added = None if grad is None else absorb_(values, grad), _NOTHING
        bits, settings = x.view(np.int32), _settings(code)
        highest = in_parts(lambda a, b: code_blocks.highest_exponent(settings, bits[a:b], a, drawn), x.size)
        code_blocks.put_header(memory, max(highest))

    def work(a: int, b: int) -> tuple[int, int]:
        vectors = *_summands(x[a:b], added[a:b]), left[a:b]
        return a, int(coding.encode(_settings(code), vectors, _NO_WEIGHT, a, memory, skip, drawn))

    places = in_parts(work, x.size, unit=code.unit, moved=bytes_moved)
    return next((start + bad for start, bad in places if bad >= 0), found)


def decode(code: Code, wires: Tensor, out: Tensor, divisor: float = 1.0) -> bool:
    """Fill ``out`` with the sum of what R messages (R, bytes) hold, divided; return whether all of it is finite."""
    target, memory = out.detach().numpy(), wires.numpy()
    settings = np.float32(divisor), code.scale_bytes(target.size)

    def work(a: int, b: int) -> int:
        return int(coding.decode(_settings(code), _NO_VALUES, a, memory, target[a:b], *settings))

    moved = 4 + memory.size / max(target.size, 1)
    return max(in_parts(work, target.size, unit=code.unit, moved=moved)) < INFINITY_BITS


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
    target, others, memory, count = mean.detach().numpy(), wires.numpy(), wire.numpy(), np.float32(len(wires) + 1)
    settings, skip, drawn, numel = _settings(code), code.scale_bytes(x.size), _words(code, key), x.size
    size = code.unit * max(1, CHUNK // code.unit)

    def work(start: int, stop: int) -> tuple[int, int]:
        first_bad, highest = numel, 0
        for a in range(start, stop, size):
            b = min(a + size, stop)
            own, out = _summands(x[a:b], added[a:b]), target[a:b]
            bad = int(coding.decode(settings, own, a, others, out, count, skip))
            first_bad = min(first_bad, a + bad) if bad >= 0 else first_bad
            vectors = *_summands(out, _NOTHING), left[a:b]
            highest = max(highest, int(coding.encode(settings, vectors, count, a, memory, skip, drawn)))
        return first_bad, highest

    moved = bytes_moved + 4 + others.size / max(numel, 1)
    bads, highest = zip(*in_parts(work, numel, unit=code.unit, moved=moved), strict=True)
    return max(highest) < INFINITY_BITS, min(bads) if min(bads) < numel else None


def encode_parts(
    code: Code,
    values: Tensor,
    wire: Tensor,
    key: Key,
    messages: Messages,
    own: int,
    rest: Tensor | None = None,
    grad: Tensor | None = None,
) -> int | None:
    """Make the messages of all parts of the values but ``own``; see `micro.codecs.coding.encode_others_`.

    Threads share the parts: they are so short that each would be encoded by one (`are_short`).
    """
    x, added, left, moved = _vectors(values, rest, grad, wire)
    table, vectors = _table(code, messages), (*_summands(x, added), left)
    drawn = np.stack([_words(code, (*key, part)) for part in range(len(table))])
    given = _settings(code), vectors, wire.numpy(), table, own, messages.sizes[own]
    bads = lists_in_parts(
        lambda first, last: int(coding.encode_parts(*given, first, last, drawn)),
        len(table),
        x.size - int(table[own, 1] - table[own, 0]),
        moved=moved,
    )
    return next((bad for bad in bads if bad >= 0), None)


def decode_parts(code: Code, wire: Tensor, messages: Messages, own: int, out: Tensor) -> bool:
    """Fill all parts of ``out`` but ``own`` with what messages of all parts hold; return whether that is finite."""
    target, table, memory = out.detach().numpy(), _table(code, messages), wire.numpy()
    given = _settings(code), _NO_VALUES, target, memory, table, own
    moved = 4 + memory.size / max(target.size, 1)
    highest = lists_in_parts(
        lambda first, last: int(coding.decode_parts(*given, first, last)),
        len(table),
        target.size - int(table[own, 1] - table[own, 0]),
        moved=moved,
    )
    return max(highest) < INFINITY_BITS


def are_short(messages: Messages) -> bool:
    """Tell whether parts are so short that each would be encoded by one thread."""
    return are_few(messages.longest)


def _vectors(
    values: Tensor, rest: Tensor | None, grad: Tensor | None, wire: Tensor
) -> tuple[Array, Array, Array, float]:
    """Return values, gradient and rest, empty where there is none, and the bytes that encoding moves for a value."""
    x, added, left = (_NOTHING if v is None else v.detach().numpy() for v in (values, grad, rest))
    return x, added, left, 4 + 8 * (grad is not None) + 4 * (rest is not None) + wire.numel() / max(x.size, 1)


def _summands(x: Array, grad: Array) -> tuple[Array, Array, Array, Array]:
    """Return the values and the gradient, each as numbers and as bits."""
    return x, x.view(np.int32), grad, grad.view(np.int32)


def _settings(code: Code) -> tuple[Any, ...]:
    return int(code.kind), code.block, code.width, np.float32(code.clip), code.is_published


def _words(code: Code, key: Key) -> Array:
    return np.array(words(*key) if code.is_random else (0, 0), np.uint32)


@lru_cache(maxsize=64)  # called at every step
def _table(code: Code, messages: Messages) -> Array:
    return np.array([(*row, code.scale_bytes(row[1] - row[0])) for row in messages.rows], np.int64)
