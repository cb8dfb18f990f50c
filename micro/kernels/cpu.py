"""The scan compiled for CPUs with numba: compare sixteen magnitudes at a time and store the indices that pass, packed.

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
MAGNITUDE_BITS = 0x7FFFFFFF  # a float32 without its sign: as an integer it orders like the magnitude
INFINITY_BITS = 0x7F800000  # larger bit patterns are NaN


@intrinsic
def _store_passing(typingctx: Any, bits: Any, start: Any, lowest: Any, out: Any, count: Any) -> Any:
    """Write to out[count:] each i in [start, start + LANES) with lowest <= magnitude <= infinity; return how many."""
    signature = types.int64(bits, start, lowest, out, count)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane, flag = ir.IntType(32), ir.IntType(1)
        lanes, flags = ir.VectorType(lane, LANES), ir.VectorType(flag, LANES)

        def spread(scalar: Any) -> Any:
            empty = ir.Constant(lanes, ir.Undefined)
            first = builder.insert_element(empty, scalar, ir.Constant(lane, 0))
            return builder.shuffle_vector(first, empty, ir.Constant(lanes, None))

        source = context.make_array(sig.args[0])(context, builder, args[0])
        target = context.make_array(sig.args[3])(context, builder, args[3])
        loaded = builder.load(builder.bitcast(builder.gep(source.data, [args[1]]), lanes.as_pointer()))
        loaded.align = 4
        magnitude = builder.and_(loaded, ir.Constant(lanes, [MAGNITUDE_BITS] * LANES))
        enough = builder.icmp_signed(">=", magnitude, spread(args[2]))
        number = builder.icmp_signed("<=", magnitude, ir.Constant(lanes, [INFINITY_BITS] * LANES))
        passing = builder.and_(enough, number)
        indices = builder.add(spread(builder.trunc(args[1], lane)), ir.Constant(lanes, list(range(LANES))))
        store_type = ir.FunctionType(ir.VoidType(), [lanes, lane.as_pointer(), flags])
        store = cgutils.get_or_insert_function(builder.module, store_type, f"llvm.masked.compressstore.v{LANES}i32")
        builder.call(store, [indices, builder.gep(target.data, [args[4]]), passing])
        return builder.zext(builder.ctpop(builder.bitcast(passing, ir.IntType(LANES))), ir.IntType(64))

    return signature, codegen


@njit(nogil=True, cache=True)
def _above(bits: Any, lowest: Any, capacity: Any) -> Any:
    out = np.empty(capacity + BLOCK, np.int32)
    count = 0
    for first in range(0, bits.size, BLOCK):
        if count + BLOCK > out.size:
            grown = np.empty(2 * out.size + BLOCK, np.int32)
            grown[:count] = out[:count]
            out = grown
        stop = min(first + BLOCK, bits.size)
        whole = stop - (stop - first) % LANES
        for start in range(first, whole, LANES):
            count += _store_passing(bits, start, lowest, out, count)  # type: ignore[call-arg]
        for i in range(whole, stop):
            magnitude = bits[i] & MAGNITUDE_BITS
            out[count] = i
            count += lowest <= magnitude <= INFINITY_BITS
    return out[:count]


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


def above(x: Tensor, threshold: float) -> Tensor:
    """Return the ascending (k,) int32 indices of contiguous float32 ``x`` (numel,) with abs(x) >= threshold."""
    lowest = torch.tensor(max(threshold, 0.0), dtype=torch.float32).view(torch.int32).item()
    bits = x.detach().view(torch.int32).numpy()
    return torch.from_numpy(_above(bits, np.int32(lowest), x.numel() // 32))
