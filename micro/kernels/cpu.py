"""The loops compiled for CPUs with numba. The scan compares sixteen magnitudes at a time and packs what passes.

Written with LLVM's compress-store, because a scalar loop (one index written per element) takes about eight times as
long, and neither numba nor torch emits the instruction by itself. Where a processor lacks it, LLVM expands it to scalar
stores: the same result, more slowly.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

LANES = 16
BLOCK = 1 << 16  # elements between two looks at the room left in the output
TILE = 1 << 12  # elements that are looked at and then added while they are in the nearest cache
MAGNITUDE_BITS = 0x7FFFFFFF  # a float32 without its sign: as an integer it orders like the magnitude
INFINITY_BITS = 0x7F800000  # larger bit patterns are NaN


@intrinsic
def _store_passing(
    typingctx: Any, bits: Any, start: Any, lowest: Any, indices: Any, magnitudes: Any, count: Any
) -> Any:
    """Write each i in [start, start + LANES) with lowest <= magnitude <= infinity, and that; return how many."""
    signature = types.int64(bits, start, lowest, indices, magnitudes, count)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane, flag = ir.IntType(32), ir.IntType(1)
        lanes, flags = ir.VectorType(lane, LANES), ir.VectorType(flag, LANES)

        def spread(scalar: Any) -> Any:
            empty = ir.Constant(lanes, ir.Undefined)
            first = builder.insert_element(empty, scalar, ir.Constant(lane, 0))
            return builder.shuffle_vector(first, empty, ir.Constant(lanes, None))

        source = context.make_array(sig.args[0])(context, builder, args[0])
        loaded = builder.load(builder.bitcast(builder.gep(source.data, [args[1]]), lanes.as_pointer()))
        loaded.align = 4
        magnitude = builder.and_(loaded, ir.Constant(lanes, [MAGNITUDE_BITS] * LANES))
        enough = builder.icmp_signed(">=", magnitude, spread(args[2]))
        number = builder.icmp_signed("<=", magnitude, ir.Constant(lanes, [INFINITY_BITS] * LANES))
        passing = builder.and_(enough, number)
        places = builder.add(spread(builder.trunc(args[1], lane)), ir.Constant(lanes, list(range(LANES))))
        store_type = ir.FunctionType(ir.VoidType(), [lanes, lane.as_pointer(), flags])
        store = cgutils.get_or_insert_function(builder.module, store_type, f"llvm.masked.compressstore.v{LANES}i32")
        for position, found in ((3, places), (4, magnitude)):
            target = context.make_array(sig.args[position])(context, builder, args[position])
            builder.call(store, [found, builder.gep(target.data, [args[5]]), passing])
        return builder.zext(builder.ctpop(builder.bitcast(passing, ir.IntType(LANES))), ir.IntType(64))

    return signature, codegen


@njit(nogil=True, cache=True)
def _grown(full: Any, count: Any) -> Any:
    grown = np.empty(2 * full.size + BLOCK, np.int32)
    grown[:count] = full[:count]
    return grown


@njit(nogil=True, cache=True)
def _above(bits: Any, lowest: Any, capacity: Any) -> Any:
    indices, magnitudes = np.empty(capacity + BLOCK, np.int32), np.empty(capacity + BLOCK, np.int32)
    count = 0
    for first in range(0, bits.size, BLOCK):
        if count + BLOCK > indices.size:
            indices, magnitudes = _grown(indices, count), _grown(magnitudes, count)
        stop = min(first + BLOCK, bits.size)
        whole = stop - (stop - first) % LANES
        for start in range(first, whole, LANES):
            count += _store_passing(bits, start, lowest, indices, magnitudes, count)  # type: ignore[call-arg]
        for i in range(whole, stop):
            magnitude = bits[i] & MAGNITUDE_BITS
            indices[count], magnitudes[count] = i, magnitude
            count += lowest <= magnitude <= INFINITY_BITS
    return indices[:count], magnitudes[:count]


@njit(nogil=True, cache=True)
def _absorb(residual: Any, grad: Any, grad_bits: Any) -> Any:
    first_bad = -1
    for start in range(0, grad.size, TILE):
        target, source, bits = (
            residual[start : start + TILE],
            grad[start : start + TILE],
            grad_bits[start : start + TILE],
        )
        highest = np.int32(0)
        for i in range(bits.size):
            highest = max(highest, bits[i] & np.int32(INFINITY_BITS))
        if highest == INFINITY_BITS:
            for i in range(bits.size):
                if bits[i] & INFINITY_BITS == INFINITY_BITS:
                    first_bad = start + i if first_bad < 0 else first_bad
                    source[i] = 0
        for i in range(source.size):
            target[i] += source[i]
        source[:] = 0
    return first_bad


def absorb_(residual: Tensor, grad: Tensor) -> int | None:
    """Add contiguous float32 ``grad`` (numel,) to ``residual`` and set it to zero; see micro.kernels."""
    target, source = residual.detach().numpy(), grad.detach().numpy()
    first_bad = int(_absorb(target, source, source.view(np.int32)))
    return None if first_bad < 0 else first_bad


@njit(nogil=True, cache=True)
def _magnitude_counts(bits: Any, first: Any, shift: Any, num_bins: Any) -> Any:
    counts = np.zeros((2, num_bins + 1), np.int32)  # two tables: equal neighbours need not wait for each other
    for i in range(bits.size):
        magnitude = bits[i] & MAGNITUDE_BITS
        place = (magnitude - first) >> shift
        counted = (magnitude > 0) & (first <= magnitude) & (magnitude < INFINITY_BITS) & (place < num_bins)
        counts[i & 1, place if counted else num_bins] += 1
    return (counts[0] + counts[1])[:num_bins]


def magnitude_counts(x: Tensor, first_bit_pattern: int, shift: int, num_bins: int) -> Tensor:
    """Return (num_bins,) int32 counts of contiguous float32 ``x`` (numel,) by ranges of bit patterns."""
    bits = x.detach().view(torch.int32).numpy()
    return torch.from_numpy(_magnitude_counts(bits, np.int64(first_bit_pattern), np.int64(shift), np.int64(num_bins)))


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return indices (k,) int32 and magnitudes (k,) of contiguous float32 ``x`` (numel,) with abs(x) >= threshold."""
    lowest = torch.tensor(max(threshold, 0.0), dtype=torch.float32).view(torch.int32).item()
    bits = x.detach().view(torch.int32).numpy()
    indices, magnitudes = _above(bits, np.int32(lowest), x.numel() // 32)
    return torch.from_numpy(indices), torch.from_numpy(magnitudes).view(torch.float32)
