"""Compiled sums over a vector for fits of thresholds, computed alone or in the pass that adds the gradient.

Numbers of a tile are summed in single precision, in lanes that are equal on every processor, and tiles in double
precision. A tile whose squares could overflow single precision is summed in double precision.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from micro.kernels.cpu import TILE, absorb_and_clear, array_of
from micro.kernels.jit import MAGNITUDE_BITS, jitted
from micro.kernels.threads import in_parts

LANES = 32
LOWEST, HIGHEST = 2.0**-40, 2.0**50  # tiles whose largest magnitude lies between are added in single precision
COUNT, TOTAL, SQUARES, MAGNITUDES, LARGEST, SMALLEST = range(6)  # what a row of sums holds
ROW = 6
FLOATS, INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)


def _adder(has_floor: bool) -> Any:
    """Return a loop's function that fills ``lanes`` (6, LANES) with sums over a vector's first ``stop`` entries.

    ``stop`` is a multiple of LANES. With a floor those whose magnitude is larger count; else rows COUNT and SMALLEST
    are left alone.
    """

    def add(typingctx: Any, x: Any, stop: Any, floor: Any, lanes: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            source, target = (context.make_array(sig.args[i])(context, builder, args[i]).data for i in (0, 3))
            zero, step = (ir.Constant(args[1].type, number) for number in (0, LANES))
            rows = range(ROW) if has_floor else range(TOTAL, SMALLEST)
            sums = {row: kept_in_registers(builder, _lanes_of(row == SMALLEST)) for row in rows}
            floors = _in_all_lanes(builder, args[2]) if has_floor else None
            with cgutils.for_range_slice(builder, zero, args[1], step) as (i, _):
                place = builder.bitcast(builder.gep(source, [i]), FLOATS.as_pointer())
                loaded = builder.load(place)
                loaded.align = 4
                _add_loaded(builder, sums, loaded, floors)
            for row, held in sums.items():
                place = builder.gep(target, [ir.Constant(args[1].type, row * LANES)])
                builder.store(builder.load(held), builder.bitcast(place, FLOATS.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(x, stop, floor, lanes), codegen

    return intrinsic(add)


def kept_in_registers(builder: Any, lanes: Any) -> Any:
    """Return memory that the compiler keeps in registers."""
    hold: Any = cgutils.alloca_once_value
    return hold(builder, lanes)


def _lanes_of(is_endless: bool) -> Any:
    return ir.Constant(FLOATS, [float("inf") if is_endless else 0.0] * LANES)


def _in_all_lanes(builder: Any, number: Any) -> Any:
    empty = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, empty, ir.Constant(INTS, None))


def _add_loaded(builder: Any, sums: dict[int, Any], value: Any, floors: Any) -> None:
    """Add LANES numbers to the sums, those alone whose magnitude is larger than the floors where there are some."""
    magnitude = builder.bitcast(
        builder.and_(builder.bitcast(value, INTS), ir.Constant(INTS, [MAGNITUDE_BITS] * LANES)), FLOATS
    )
    if floors is not None:
        is_above = builder.fcmp_ordered(">", magnitude, floors)
        one = builder.select(is_above, ir.Constant(FLOATS, [1.0] * LANES), _lanes_of(False))
        builder.store(builder.fadd(builder.load(sums[COUNT]), one), sums[COUNT])
        size, least = builder.select(is_above, magnitude, _lanes_of(True)), builder.load(sums[SMALLEST])
        builder.store(builder.select(builder.fcmp_ordered("<", size, least), size, least), sums[SMALLEST])
        value, magnitude = (builder.select(is_above, each, _lanes_of(False)) for each in (value, magnitude))
    for row, term in ((TOTAL, value), (SQUARES, builder.fmul(magnitude, magnitude)), (MAGNITUDES, magnitude)):
        builder.store(builder.fadd(builder.load(sums[row]), term), sums[row])
    most = builder.load(sums[LARGEST])
    builder.store(builder.select(builder.fcmp_ordered(">", magnitude, most), magnitude, most), sums[LARGEST])


_add_all, _add_above = _adder(False), _adder(True)


@jitted
def _add_one(row: Any, value: Any, floor: Any) -> Any:
    magnitude = abs(value)
    if magnitude > floor:
        row[COUNT] += 1.0
        row[TOTAL] += value
        row[SQUARES] += magnitude * magnitude
        row[MAGNITUDES] += magnitude
        row[LARGEST] = max(row[LARGEST], magnitude)
        row[SMALLEST] = min(row[SMALLEST], magnitude)


@jitted
def _clear(row: Any) -> Any:
    row[:] = 0.0
    row[SMALLEST] = np.inf


@jitted
def _add_tile(x: Any, floor: Any, lanes: Any, row: Any) -> Any:
    """Fill ``row`` (6,) with the sums of a tile."""
    whole = x.size - x.size % LANES
    if floor < 0:
        _add_all(x, whole, floor, lanes)
        lanes[COUNT], lanes[SMALLEST] = np.float32(whole // LANES), np.float32(np.inf)
    else:
        _add_above(x, whole, floor, lanes)
    _clear(row)
    for lane in range(LANES):
        for number in range(LARGEST):
            row[number] += lanes[number, lane]
        row[LARGEST] = max(row[LARGEST], np.float64(lanes[LARGEST, lane]))
        row[SMALLEST] = min(row[SMALLEST], np.float64(lanes[SMALLEST, lane]))
    if row[LARGEST] and not LOWEST <= row[LARGEST] <= HIGHEST:
        _clear(row)
        whole = 0
    for i in range(whole, x.size):
        _add_one(row, np.float64(x[i]), floor)


@jitted
def _sums(x: Any, floor: Any, rows: Any) -> Any:
    lanes = np.empty((ROW, LANES), np.float32)
    for start in range(0, x.size, TILE):
        _add_tile(x[start : start + TILE], floor, lanes, rows[start // TILE])


@jitted
def _absorb_and_sum(residual: Any, residual_bits: Any, grad: Any, grad_bits: Any, floor: Any, rows: Any) -> Any:
    first_bad = -1
    lanes = np.empty((ROW, LANES), np.float32)
    for start in range(0, grad.size, TILE):
        end = min(start + TILE, grad.size)
        target = residual[start:end]
        bad = absorb_and_clear(target, residual_bits[start:end], grad[start:end], grad_bits[start:end])
        first_bad = start + bad if first_bad < 0 <= bad else first_bad
        _add_tile(target, floor, lanes, rows[start // TILE])
    return first_bad


def sums(x: Tensor, floor: float) -> list[float]:
    """Return the sums of those of contiguous float32 ``x`` (numel,) whose magnitude is larger than ``floor``.

    A floor of -1 counts all; the smallest is not known then.
    """
    values, rows, lowest = array_of(x), _rows(x.numel()), np.float32(floor)
    in_parts(lambda a, b: _sums(values[a:b], lowest, rows[a // TILE :]), x.numel(), unit=TILE)
    return _together(rows)


def absorb_and_sum_(residual: Tensor, grad: Tensor) -> tuple[int | None, list[float]]:
    """Do what `absorbing.absorb_` does for float32 vectors; return what it does, and the residual's sums."""
    target, source, rows = array_of(residual), array_of(grad), _rows(grad.numel())
    target_bits, source_bits, floor = target.view(np.int32), source.view(np.int32), np.float32(-1)

    def absorb(a: int, b: int) -> tuple[int, int]:
        pieces = target[a:b], target_bits[a:b], source[a:b], source_bits[a:b]
        return a + int(_absorb_and_sum(*pieces, floor, rows[a // TILE :])), a

    found = in_parts(absorb, grad.numel(), unit=TILE, moved=16)
    return next((place for place, start in found if place >= start), None), _together(rows)


def _rows(numel: int) -> Any:
    return np.empty((-(-numel // TILE), ROW))


def _together(rows: Any) -> list[float]:
    if not len(rows):
        return [0.0] * LARGEST + [0.0, np.inf]
    return [*rows[:, :LARGEST].sum(0).tolist(), float(rows[:, LARGEST].max()), float(rows[:, SMALLEST].min())]
