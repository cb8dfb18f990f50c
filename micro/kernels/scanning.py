"""The loops compiled for CPUs with numba. The scan compares 64 magnitudes at a time and then visits what passes.

The comparison is written as LLVM vectors, because a scalar loop that writes one index per element takes about eight
times as long, and neither numba nor torch emits anything better by itself. Storing what passes with the processors'
own compress instruction would spare the visits, but on some of them it is microcoded and six times slower.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from micro.kernels.jit import (
    INFINITY_BITS,
    MAGNITUDE_BITS,
    bits_of,
    jitted,
    lowest_bit,
    num_bits,
)
from micro.kernels.threads import are_few, in_parts

LANES = 64
AT_ONCE = 3  # hits written of each word, there or not: a branch that is guessed wrong costs more than these
BLOCK = 1 << 16  # elements between two looks at the room left in the output


@intrinsic
def passing(typingctx: Any, bits: Any, start: Any, lowest: Any) -> Any:
    """Return a word whose bit i tells whether lowest <= magnitude <= infinity at ``start + i``."""
    signature = types.uint64(bits, start, lowest)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane = ir.IntType(32)
        lanes = ir.VectorType(lane, LANES)
        source = context.make_array(sig.args[0])(context, builder, args[0])
        loaded = builder.load(builder.bitcast(builder.gep(source.data, [args[1]]), lanes.as_pointer()))
        loaded.align = 4
        empty = ir.Constant(lanes, ir.Undefined)
        first = builder.insert_element(empty, args[2], ir.Constant(lane, 0))
        floor = builder.shuffle_vector(first, empty, ir.Constant(lanes, None))
        magnitude = builder.and_(loaded, ir.Constant(lanes, [MAGNITUDE_BITS] * LANES))
        enough = builder.icmp_signed(">=", magnitude, floor)
        number = builder.icmp_signed("<=", magnitude, ir.Constant(lanes, [INFINITY_BITS] * LANES))
        return builder.bitcast(builder.and_(enough, number), ir.IntType(LANES))

    return signature, codegen


@jitted
def _grown(full: Any, count: Any) -> Any:
    grown = np.empty(2 * full.size + BLOCK, np.int32)
    grown[:count] = full[:count]
    return grown


@jitted
def _scan(bits: Any, first: Any, stop: Any, lowest: Any, indices: Any, magnitudes: Any, count: Any) -> Any:
    """Write place and magnitude of all in [first, stop) that pass, from place ``count`` on; return the next.

    The lists have room for all of them, and AT_ONCE more.
    """
    whole = stop - (stop - first) % LANES
    for start in range(first, whole, LANES):
        word: Any = passing(bits, start, lowest)  # type: ignore[call-arg]
        place, count = count, count + np.int64(num_bits(word))
        for _ in range(AT_ONCE):  # past the last hit it writes what the next word overwrites
            i = start + (lowest_bit(word) & (LANES - 1))
            indices[place], magnitudes[place] = i, bits[i] & MAGNITUDE_BITS
            place += 1
            word &= word - np.uint64(1)
        while word:
            i = start + lowest_bit(word)
            indices[place], magnitudes[place] = i, bits[i] & MAGNITUDE_BITS
            place += 1
            word &= word - np.uint64(1)
    for i in range(whole, stop):
        magnitude = bits[i] & MAGNITUDE_BITS
        indices[count], magnitudes[count] = i, magnitude
        count += lowest <= magnitude <= INFINITY_BITS
    return count


@jitted
def _above(bits: Any, pieces: Any, lowests: Any, capacity: Any) -> Any:
    room = capacity + BLOCK + AT_ONCE
    indices, magnitudes = np.empty(room, np.int32), np.empty(room, np.int32)
    count = 0
    for piece in range(lowests.size):
        lowest, end = lowests[piece], pieces[piece, 1]
        for first in range(pieces[piece, 0], end, BLOCK):
            if count + BLOCK + AT_ONCE > indices.size:
                indices, magnitudes = _grown(indices, count), _grown(magnitudes, count)
            count = _scan(bits, first, min(first + BLOCK, end), lowest, indices, magnitudes, count)
    return indices[:count], magnitudes[:count]


@jitted
def _kth_by_run(bits: Any, lengths: Any, ranks: Any) -> Any:
    found = np.empty(lengths.size, np.int32)
    first = 0
    for run in range(lengths.size):
        length, rank = lengths[run], ranks[run]
        if rank < 1:
            found[run] = INFINITY_BITS
        elif rank > length:
            found[run] = 0
        else:
            found[run] = np.partition(bits[first : first + length], length - rank)[length - rank]
        first += length
    return found


def kth_by_run(magnitudes: Tensor, lengths: Tensor, ranks: Tensor) -> Tensor:
    """Return the ``ranks[s]``-th largest (S,) of contiguous float32 ``magnitudes`` in each run; see micro.kernels."""
    bits = bits_of(magnitudes)
    return torch.from_numpy(_kth_by_run(bits, lengths.numpy(), ranks.numpy())).view(torch.float32)


@jitted
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
    bits, bins = bits_of(x), (np.int64(first_bit_pattern), np.int64(shift), np.int64(num_bins))
    found = in_parts(lambda start, stop: _magnitude_counts(bits[start:stop], *bins), bits.size)
    return torch.from_numpy(found[0] if len(found) == 1 else np.sum(found, axis=0, dtype=np.int32))


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return indices (k,) int32 and magnitudes (k,) of contiguous float32 ``x`` (numel,) with abs(x) >= threshold."""
    return _found(x, np.array([[0, x.numel()]]), np.array([threshold]))


def above_by_piece(x: Tensor, pieces: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `above` does, with one threshold (S,) for each piece [start, stop) of ``pieces`` (S, 2) int64."""
    return _found(x, pieces.numpy(), thresholds.numpy())


def _found(x: Tensor, pieces: Any, thresholds: Any) -> tuple[Tensor, Tensor]:
    with np.errstate(over="ignore"):  # a threshold beyond the largest float32 is infinity
        lowests = np.maximum(thresholds.astype(np.float32), np.float32(0)).view(np.int32)
    indices, magnitudes = scan(bits_of(x), pieces, lowests)
    return torch.from_numpy(indices), torch.from_numpy(magnitudes.view(np.float32))


def scan(bits: Any, pieces: Any, lowests: Any) -> tuple[Any, Any]:
    """Return indices and magnitudes, both (k,) int32, of what reaches the lowest magnitude of its piece; all as bits.

    Args:
        bits: (numel,) int32.
        pieces: (S, 2) int64 starts and stops, ascending, not overlapping.
        lowests: (S,) int32, none negative.
    """
    if are_few(bits.size):
        found: tuple[Any, Any] = _above(bits, pieces, lowests, bits.size // 32)
        return found
    starts, lengths = pieces[:, :1], pieces[:, 1] - pieces[:, 0]
    before = lengths.cumsum() - lengths

    def search(start: int, stop: int) -> Any:
        inside = np.clip([start - before, stop - before], 0, lengths).T
        return _above(bits, starts + inside, lowests, (stop - start) // 32)

    parts = in_parts(search, int(lengths.sum()), unit=LANES)
    indices, magnitudes = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
    return indices, magnitudes
