"""The compiled codes of a vector's parts as functions of tensors: all messages in one call; see `micro.kernels.codes`.

A codec gives a `PartCode`. It serves parts of which each would be encoded by one thread: threads share the parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor

from micro.codecs.messages import Messages
from micro.kernels import blockwise, messages
from micro.kernels.codes import Array, Values
from micro.kernels.jit import INFINITY_BITS
from micro.kernels.threads import are_few, lists_in_parts

Placed = tuple[Array, Array, int, int]  # see micro.kernels.messages


@dataclass(frozen=True, slots=True)
class PartCode:
    """How messages of parts are made and read.

    Attributes:
        encode: gets vectors, where messages lie, the first part, the one behind the last, and words (n, 2).
        decode: gets the vector, where messages lie, the first part and the one behind the last.
        is_random: whether words are used.
    """

    encode: Callable[[tuple[Array, ...], Placed, int, int, Array], int]
    decode: Callable[[Array, Placed, int, int], int]
    is_random: bool = False


def serves(lying: Messages) -> bool:
    """Tell whether parts are so short that each would be encoded by one thread."""
    return are_few(lying.longest)


def encode(
    code: PartCode, values: Values, wire: Tensor, lying: Messages, own: int, digests: bytes | None
) -> int | None:
    """Make the messages of all parts but ``own``; return the first sum with the gradient that is too large, or None.

    Args:
        wire: bytes of these messages, without one of ``own``.
        digests: 8 bytes for each part, which make its random numbers; None: nothing is random.
    """
    table, memory = _table(lying), wire.numpy()
    words = np.frombuffer(digests or bytes(8 * len(table)), np.uint32).reshape(-1, 2)
    places, vectors = (memory, table, own, lying.sizes[own]), (*values.summands, values.rest)
    numel = values.x.size
    moved = values.bytes_to_add + values.bytes_to_leave + memory.size / max(numel, 1)
    bads = lists_in_parts(
        lambda first, last: int(code.encode(vectors, places, first, last, words)),
        len(table),
        numel - int(table[own, 1] - table[own, 0]),
        moved=moved,
    )
    return next((bad for bad in bads if bad >= 0), None)


def decode(code: PartCode, wire: Tensor, lying: Messages, own: int, out: Tensor) -> bool:
    """Fill all parts of ``out`` but ``own`` with what messages of all parts hold; return whether that is finite."""
    target, table, memory = out.detach().numpy(), _table(lying), wire.numpy()
    places = memory, table, own, 0
    highest = lists_in_parts(
        lambda first, last: int(code.decode(target, places, first, last)),
        len(table),
        target.size - int(table[own, 1] - table[own, 0]),
        moved=4 + memory.size / max(target.size, 1),
    )
    return max(highest) < INFINITY_BITS


@lru_cache(maxsize=64)  # called at every step
def _table(lying: Messages) -> Array:
    return np.array(lying.rows, np.int64)


def cast(*, is_half: bool) -> PartCode:
    """Return the code of codecs half and bfloat16."""
    return PartCode(
        encode=lambda vectors, lying, first, last, _: messages.encode_cast(vectors, lying, first, last, is_half),
        decode=lambda out, lying, first, last: messages.decode_cast(out, lying, first, last, is_half),
    )


def int8(*, block: int, is_random: bool) -> PartCode:
    """Return the code of codec int8."""
    group = blockwise.group_size(block)
    return PartCode(
        lambda *given: messages.encode_int8(*given, block, group, is_random),
        lambda *given: messages.decode_int8(*given, block, group),
        is_random,
    )


def signs(*, block: int) -> PartCode:
    """Return the code of codec sign."""
    group = blockwise.group_size(block, blockwise.BITS)
    return PartCode(
        lambda vectors, lying, first, last, _: messages.encode_signs(vectors, lying, first, last, block, group),
        lambda *given: messages.decode_signs(*given, block, group),
    )
