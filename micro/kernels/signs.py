"""Compiled codes of one bit a value: its sign, and one or two means of its block; see `micro.kernels.blockwise`.

Signs are taken, and means spread, 64 at a time, as LLVM vectors: a word holds the bits of its lanes.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from micro.kernels.blockwise import LARGEST, cut, get_scale, put_scale
from micro.kernels.jit import get64, jitted, put64
from micro.kernels.tiles import absorb_part, finish, leave, outcome
from micro.kernels.tree_sums import total

LANES = 64
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _lanes_at(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    source = context.make_array(array_type)(context, builder, array)
    return builder.bitcast(builder.gep(source.data, [start]), _VECTOR.as_pointer())


def _splat(builder: Any, number: Any) -> Any:
    empty = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(ir.IntType(32), LANES), None))


def _negative_lanes(typingctx: Any, values: Any, start: Any) -> Any:
    """Return a word whose bit i tells whether the value at ``start + i`` is negative."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        loaded = builder.load(_lanes_at(context, builder, sig.args[0], *args))
        loaded.align = 4
        negative = builder.fcmp_ordered("<", loaded, ir.Constant(_VECTOR, [0.0] * LANES))
        return builder.bitcast(negative, ir.IntType(LANES))

    return types.uint64(values, types.int64), codegen


def _spreader(is_first: bool) -> Any:
    def spread(typingctx: Any, out: Any, start: Any, word: Any, upper: Any, lower: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = _lanes_at(context, builder, sig.args[0], args[0], args[1])
            negative = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), LANES))
            means = builder.select(negative, _splat(builder, args[4]), _splat(builder, args[3]))
            if not is_first:
                before = builder.load(place)
                before.align = 4
                means = builder.fadd(before, means)
            builder.store(means, place).align = 4
            return context.get_dummy_value()

        return types.void(out, types.int64, types.uint64, types.float32, types.float32), codegen

    return intrinsic(spread)


_negative: Any = intrinsic(_negative_lanes)
_put_lanes, _add_lanes = _spreader(True), _spreader(False)


@jitted
def _pack_signs(x: Any, packed: Any) -> Any:
    """Fill ``packed`` with a bit for each value: 1 where it is negative."""
    whole = x.size // LANES
    for i in range(whole):
        put64(packed, i, _negative(x, LANES * i))
    for start in range(LANES * whole, x.size, 8):
        byte = np.uint8(0)
        for i in range(start, min(start + 8, x.size)):
            byte |= np.uint8(np.int32(x[i] < 0) << np.int32(i - start))
        packed[start // 8] = byte


@jitted
def _count_negative(x: Any) -> Any:
    count = np.int32(0)
    for i in range(x.size):
        count += np.int32(x[i] < 0)
    return np.int32(count)


@jitted
def encode_signs(
    values: Any,
    bits: Any,
    grad: Any,
    grad_bits: Any,
    rest: Any,
    weight: Any,
    place: Any,
    header: Any,
    lowers: Any,
    packed: Any,
    block: Any,
    group: Any,
    has_two: Any,
) -> Any:
    """Fill ``header``, ``lowers`` and ``packed`` as codec onebit has them; without two means, as codec sign has."""
    terms = np.empty(min(block, values.size), np.float32)
    zero, one = np.float32(0), np.float32(1)
    first_bad = -1
    for first in range(0, values.size, group):
        end = min(first + group, values.size)
        first_bad = absorb_part(values, bits, grad, grad_bits, first, end, first_bad)
        _pack_signs(values[first:end], packed[(place + first) // 8 :])
        for start in range(first, end, block):
            x = values[start : min(start + block, end)]
            term = terms[: x.size]
            if has_two:
                num_negative = _count_negative(x)
                count = np.float32(x.size - num_negative) if num_negative < x.size else one
                for i in range(x.size):
                    term[i] = zero if x[i] < 0 else x[i] / count
                upper = np.float32(cut(total(term), LARGEST))
                count = np.float32(num_negative) if num_negative > 0 else one
                for i in range(x.size):
                    term[i] = x[i] / count if x[i] < 0 else zero
                lower = np.float32(cut(total(term), LARGEST))
                put_scale(lowers, (place + start) // block, lower)
            else:
                count = np.float32(x.size)
                for i in range(x.size):
                    term[i] = abs(x[i] / count)
                upper = np.float32(cut(total(term), LARGEST))
                lower = np.float32(-upper)
            put_scale(header, (place + start) // block, upper)
            if rest.size or weight:
                for i in range(x.size):
                    term[i] = lower if x[i] < 0 else upper
                leave(rest[start : start + x.size], x, term, weight)
    return outcome(bits, first_bad, weight)


@jitted
def _spread(packed: Any, begin: Any, upper: Any, lower: Any, out: Any, is_first: Any) -> Any:
    """Make ``out`` the lower mean where a bit from ``begin`` on is set, the upper elsewhere, or add that."""
    whole = 0 if begin % 8 else out.size // LANES
    words = packed[begin // 8 :]
    for i in range(whole):
        if is_first:
            _put_lanes(out, LANES * i, get64(words, i), upper, lower)
        else:
            _add_lanes(out, LANES * i, get64(words, i), upper, lower)
    for i in range(LANES * whole, out.size):
        bit = begin + i
        mean = lower if (packed[bit // 8] >> np.uint8(bit % 8)) & np.uint8(1) else upper
        out[i] = mean if is_first else out[i] + mean


@jitted
def decode_signs(
    own: Any, place: Any, wires: Any, out: Any, divisor: Any, num_blocks: Any, block: Any, group: Any, has_two: Any
) -> Any:
    """Fill ``out`` with the sum over R messages (R, bytes) of what the signs stand for, divided."""
    highest, first_bad = np.int32(0), -1
    skip = 4 * num_blocks * (2 if has_two else 1)
    for first in range(0, out.size, group):
        end = min(first + group, out.size)
        first_bad = absorb_part(*own, first, end, first_bad)
        for row in range(wires.shape[0]):
            wire = wires[row]
            packed = wire[skip + (place + first) // 8 :]
            for start in range(first, end, block):
                number = (place + start) // block
                upper = get_scale(wire, number)
                lower = get_scale(wire, num_blocks + number) if has_two else np.float32(-upper)
                _spread(packed, start - first, upper, lower, out[start : min(start + block, end)], row == 0)
        highest = max(highest, finish(out[first:end], own[0][first:end], divisor, wires.shape[0] == 0))
    return np.int64(first_bad) if own[0].size else np.int64(highest)
