"""Compiled codes of values: half precision, bfloat16, int8 and sign, a block after the other.

A block is read and written while it is in the nearest cache. ``wire`` is a whole message at any address: the scales of
its blocks, then from byte ``skip`` on the codes. ``place``, a multiple of the block, says where the values lie in it.

``grad``, where it is not empty, is added to the values first, as `tiles.absorb_tile` does, and the place of the first
sum that is too large is returned, or -1. ``rest``, where it is not empty, becomes ``values - decoded``. With a
``weight`` other than zero it becomes that many times this, the values become what is decoded, and the bit pattern of
their largest magnitude is returned.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from micro.kernels.code import Kind
from micro.kernels.floats import of_bfloat16, of_half, to_bfloat16, to_half
from micro.kernels.jit import as_bits, as_float, get16, get32, get64, jitted, put16, put32, put64
from micro.kernels.tiles import absorb_tile, finish, highest_bits, leave

HALF, BFLOAT16, INT8 = int(Kind.HALF), int(Kind.BFLOAT16), int(Kind.INT8)
LARGEST = np.float32(2.0**127)
LEVELS = np.float32(127)
LANES = 64
NO_WEIGHT, ONE = np.float32(0), np.float32(1)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _lanes_at(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    source = context.make_array(array_type)(context, builder, array)
    return builder.bitcast(builder.gep(source.data, [start]), _VECTOR.as_pointer())


def _negative_lanes(typingctx: Any, values: Any, start: Any) -> Any:
    """Return a word whose bit i tells whether the value at ``start + i`` is negative."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        loaded = builder.load(_lanes_at(context, builder, sig.args[0], *args))
        loaded.align = 4
        negative = builder.fcmp_ordered("<", loaded, ir.Constant(_VECTOR, [0.0] * LANES))
        return builder.bitcast(negative, ir.IntType(LANES))

    return types.uint64(values, types.int64), codegen


def _spread_lanes(typingctx: Any, out: Any, start: Any, word: Any, mean: Any) -> Any:
    """Write LANES means from ``start`` on, negative where a bit of the word is set."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = _lanes_at(context, builder, sig.args[0], args[0], args[1])
        empty, lanes = ir.Constant(_VECTOR, ir.Undefined), ir.VectorType(ir.IntType(32), LANES)
        first = builder.insert_element(empty, args[3], ir.Constant(ir.IntType(32), 0))
        means = builder.shuffle_vector(first, empty, ir.Constant(lanes, None))
        negative = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), LANES))
        builder.store(builder.select(negative, builder.fneg(means), means), place).align = 4
        return context.get_dummy_value()

    return types.void(out, types.int64, types.uint64, types.float32), codegen


_negative: Any = intrinsic(_negative_lanes)
_put_lanes: Any = intrinsic(_spread_lanes)


@jitted
def _put_scale(wire: Any, number: Any, scale: Any) -> Any:
    put32(wire, number, np.uint64(np.uint32(as_bits(np.float32(scale)))))


@jitted
def _get_scale(wire: Any, number: Any) -> Any:
    return as_float(np.int32(get32(wire, number)))


@jitted
def _cut(level: Any, highest: Any) -> Any:
    """Return the level in -highest to highest."""
    level = level if level < highest else highest
    return level if level > -highest else -highest


@jitted
def _total(terms: Any) -> Any:
    """Return the sum of the terms, which are used up, in the order of `micro.codecs.blocks.sums`."""
    count = terms.size
    while count > 1:
        half = 1
        while 2 * half < count:
            half *= 2
        low, high = terms[: count - half], terms[half:count]
        for i in range(low.size):
            low[i] += high[i]
        count = half
    return np.float32(terms[0])


@jitted
def _write_int8(x: Any, bits: Any, codes: Any) -> Any:
    """Fill ``codes`` with multiples of a step; return the step."""
    largest: Any = as_float(highest_bits(bits))
    step = np.float32((LARGEST if largest > LARGEST else largest) / LEVELS)
    divisor = step if step > 0 else np.float32(np.inf)  # of zeros
    target = codes[: x.size].view(np.int8)
    for i in range(x.size):
        target[i] = np.int8(np.int32(_cut(np.rint(x[i] / divisor), LEVELS)))
    return step


@jitted
def _write_signs(x: Any, codes: Any, terms: Any) -> Any:
    """Fill ``codes`` with a bit for each value, 1 where it is negative; return the mean magnitude."""
    whole = x.size // LANES
    for i in range(whole):
        put64(codes, i, _negative(x, LANES * i))
    for start in range(LANES * whole, x.size, 8):
        byte = np.uint8(0)
        for i in range(start, min(start + 8, x.size)):
            byte |= np.uint8(np.int32(x[i] < 0) << np.int32(i - start))
        codes[start // 8] = byte
    count = np.float32(x.size)
    for i in range(x.size):
        terms[i] = abs(x[i] / count)
    return np.float32(_cut(_total(terms), LARGEST))


@jitted
def _write(kind: Any, x: Any, bits: Any, wire: Any, place: Any, skip: Any, block: Any, memory: Any) -> Any:
    """Code a block of values, which begins at ``place``; ``memory`` is as long."""
    if kind == HALF:
        codes = wire[2 * place :]
        for i in range(x.size):
            put16(codes, i, np.uint64(to_half(x[i])))
    elif kind == BFLOAT16:
        codes = wire[2 * place :]
        for i in range(x.size):
            put16(codes, i, np.uint64(to_bfloat16(x[i])))
    elif kind == INT8:
        _put_scale(wire, place // block, _write_int8(x, bits, wire[skip + place :]))
    else:
        _put_scale(wire, place // block, _write_signs(x, wire[skip + place // 8 :], memory))


@jitted
def _read(kind: Any, wire: Any, place: Any, skip: Any, block: Any, out: Any) -> Any:
    """Fill ``out`` with what a block stands for."""
    if kind == HALF:
        codes = wire[2 * place :]
        for i in range(out.size):
            out[i] = of_half(np.int32(get16(codes, i)))
    elif kind == BFLOAT16:
        codes = wire[2 * place :]
        for i in range(out.size):
            out[i] = of_bfloat16(np.int32(get16(codes, i)))
    elif kind == INT8:
        multiples, step = wire[skip + place : skip + place + out.size].view(np.int8), _get_scale(wire, place // block)
        for i in range(out.size):
            out[i] = np.float32(multiples[i]) * step
    else:
        _read_signs(wire[skip + place // 8 :], _get_scale(wire, place // block), out)


@jitted
def _read_signs(codes: Any, mean: Any, out: Any) -> Any:
    whole = out.size // LANES
    for i in range(whole):
        _put_lanes(out, LANES * i, get64(codes, i), mean)
    for i in range(LANES * whole, out.size):
        out[i] = -mean if (codes[i // 8] >> np.uint8(i % 8)) & np.uint8(1) else mean


@jitted
def _absorbed(values: Any, bits: Any, grad: Any, grad_bits: Any, start: Any, end: Any, first_bad: Any) -> Any:
    """Add the gradient from ``start`` to ``end``, where there is one; return ``first_bad``, or the first one here."""
    if grad.size == 0:
        return first_bad
    bad = absorb_tile(values[start:end], bits[start:end], grad[start:end], grad_bits[start:end])
    return start + bad if first_bad < 0 <= bad else first_bad


@jitted
def encode(
    kind: Any,
    values: Any,
    bits: Any,
    grad: Any,
    grad_bits: Any,
    rest: Any,
    weight: Any,
    place: Any,
    wire: Any,
    skip: Any,
    block: Any,
) -> Any:
    """Code values into their places of a message."""
    memory, first_bad = np.empty(min(block, values.size), np.float32), -1
    for start in range(0, values.size, block):
        end = min(start + block, values.size)
        first_bad = _absorbed(values, bits, grad, grad_bits, start, end, first_bad)
        x, near = values[start:end], memory[: end - start]
        _write(kind, x, bits[start:end], wire, place + start, skip, block, near)
        if rest.size or weight:
            _read(kind, wire, place + start, skip, block, near)
            leave(rest[start:end], x, near, weight)
    return np.int64(first_bad) if weight == 0 else np.int64(highest_bits(bits))


@jitted
def decode(kind: Any, own: Any, place: Any, wires: Any, out: Any, divisor: Any, skip: Any, block: Any) -> Any:
    """Fill ``out`` with the sum of what R messages (R, bytes) hold, and of the ``own`` values where there are some.

    The sum is divided. Its largest magnitude's bit pattern is returned; with own values, and their gradient, each as
    numbers and as bits, the place of their first sum that is too large.
    """
    memory, highest, first_bad = np.empty(min(block, out.size), np.float32), np.int32(0), -1
    for start in range(0, out.size, block):
        end = min(start + block, out.size)
        target, near = out[start:end], memory[: end - start]
        first_bad = _absorbed(*own, start, end, first_bad)
        for row in range(wires.shape[0]):
            if row == 0:
                _read(kind, wires[row], place + start, skip, block, target)
            else:
                _read(kind, wires[row], place + start, skip, block, near)
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
def _skip(kind: Any, count: Any, block: Any) -> Any:
    return 0 if kind <= BFLOAT16 else 4 * ((count + block - 1) // block)


@jitted
def encode_parts(
    kind: Any, vectors: Any, wire: Any, table: Any, own: Any, missing: Any, first: Any, last: Any, block: Any
) -> Any:
    """Code parts ``first`` to ``last`` of the values but ``own``, each a message of its own.

    ``table`` (n, 4) says where parts and messages begin and end; see `micro.codecs.messages`.
    """
    values, bits, grad, grad_bits, rest = vectors
    first_bad = np.int64(-1)
    for part in range(first, last):
        a, b, begin, end = _span(table, own, missing, part)
        if a < b:
            left, skip = rest[a:b], _skip(kind, b - a, block)
            given = values[a:b], bits[a:b], grad[a:b], grad_bits[a:b]
            bad = encode(kind, *given, left, NO_WEIGHT, 0, wire[begin:end], skip, block)
            first_bad = np.int64(a + bad) if first_bad < 0 <= bad else first_bad
    return first_bad


@jitted
def decode_parts(
    kind: Any, own: Any, out: Any, wire: Any, table: Any, mine: Any, first: Any, last: Any, block: Any
) -> Any:
    """Fill parts ``first`` to ``last`` of ``out`` but ``mine``; return the largest magnitude's bit pattern.

    ``own`` are no values.
    """
    highest = np.int64(0)
    for part in range(first, last):
        a, b, begin, end = _span(table, mine, 0, part)
        if a < b:
            message = wire[begin:end].reshape((1, end - begin))
            highest = max(highest, decode(kind, own, 0, message, out[a:b], ONE, _skip(kind, b - a, block), block))
    return highest
