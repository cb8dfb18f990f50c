"""Compiled codes of values, a block after the other.

A block is read and written while it is in the nearest cache. ``wire`` is a whole message at any address: the scales of
its blocks, then from byte ``skip`` on the codes. ``place``, a multiple of the block, says where the values lie in it.

``grad``, where it is not empty, is added to the values first, as `tiles.absorb_tile` does, and the place of the first
sum that is too large is returned, or -1. ``rest``, where it is not empty, becomes ``values - decoded``. With a
``weight`` other than zero it becomes that many times this, the values become what is decoded, and the bit pattern of
their largest magnitude is returned.
"""

from typing import Any

import numpy as np

from micro.kernels.code_blocks import ONE, POWERS, highest_exponent, put_header, read_block, write_block
from micro.kernels.jit import jitted
from micro.kernels.tiles import absorb_tile, finish, highest_bits, leave

NO_WEIGHT = np.float32(0)


@jitted
def _absorbed(values: Any, bits: Any, grad: Any, grad_bits: Any, start: Any, end: Any, first_bad: Any) -> Any:
    """Add the gradient from ``start`` to ``end``, where there is one; return ``first_bad``, or the first one here."""
    if grad.size == 0:
        return first_bad
    bad = absorb_tile(values[start:end], bits[start:end], grad[start:end], grad_bits[start:end])
    return start + bad if first_bad < 0 <= bad else first_bad


@jitted
def encode(code: Any, vectors: Any, weight: Any, place: Any, wire: Any, skip: Any, words: Any) -> Any:
    """Code values into their places of a message; ``vectors`` are values, gradient, each with its bits, and rest."""
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
def decode(code: Any, own: Any, place: Any, wires: Any, out: Any, divisor: Any, skip: Any) -> Any:
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
def _span(table: Any, own: Any, missing: Any, part: Any) -> Any:
    """Return where a part begins and ends, and its message; ``missing`` bytes of the ``own`` part are left out."""
    shift = missing if part > own else 0
    stop = table[part, 0] if part == own else table[part, 1]
    return table[part, 0], stop, table[part, 2] - shift, table[part, 3] - shift


@jitted
def encode_parts(
    code: Any, vectors: Any, wire: Any, table: Any, own: Any, missing: Any, first: Any, last: Any, words: Any
) -> Any:
    """Code parts ``first`` to ``last`` of the values but ``own``, each a message of its own.

    ``table`` (n, 5) says where parts and messages begin and end, see `micro.codecs.messages`, and where codes do;
    ``words`` (n, 2) make what is random.
    """
    values, bits, grad, grad_bits, rest = vectors
    first_bad = np.int64(-1)
    for part in range(first, last):
        a, b, begin, end = _span(table, own, missing, part)
        if a < b:
            message, skip, bad = wire[begin:end], table[part, 4], np.int64(-1)
            x, x_bits, added, added_bits = values[a:b], bits[a:b], grad[a:b], grad_bits[a:b]
            if code[0] == POWERS:
                bad = np.int64(_absorbed(x, x_bits, added, added_bits, 0, x.size, -1))
                added, added_bits = added[:0], added_bits[:0]
                put_header(message, highest_exponent(code, x_bits, 0, words[part]))
            given = x, x_bits, added, added_bits, rest[a:b]
            bad = max(bad, encode(code, given, NO_WEIGHT, 0, message, skip, words[part]))
            first_bad = np.int64(a + bad) if first_bad < 0 <= bad else first_bad
    return first_bad


@jitted
def decode_parts(code: Any, own: Any, out: Any, wire: Any, table: Any, mine: Any, first: Any, last: Any) -> Any:
    """Fill parts ``first`` to ``last`` of ``out`` but ``mine``; return the largest magnitude's bit pattern.

    ``own`` are no values.
    """
    highest = np.int64(0)
    for part in range(first, last):
        a, b, begin, end = _span(table, mine, 0, part)
        if a < b:
            message = wire[begin:end].reshape((1, end - begin))
            highest = max(highest, decode(code, own, 0, message, out[a:b], ONE, table[part, 4]))
    return highest
