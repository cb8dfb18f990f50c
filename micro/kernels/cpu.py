"""Compiled passes over a vector on a CPU. The scan compares 64 magnitudes at a time, then visits those that pass.

The comparison uses LLVM vectors, because a scalar loop that writes one index per element takes about eight times as
long, and neither numba nor torch generates better code. Compress instructions would avoid the visits, but on some
processors they are microcoded and six times slower.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from micro.kernels.jit import INFINITY_BITS, MAGNITUDE_BITS, jitted, lowest_bit, num_bits
from micro.kernels.magnitudes import NUM_BINS
from micro.kernels.threads import are_few, in_parts

LANES = 64
AT_ONCE = 3  # hits written of each word, there or not: a branch that is guessed wrong costs more than these
BLOCK = 1 << 16  # elements between two looks at the room left in the output
TILE = 1 << 12  # elements of a part that fits in the first-level cache
STRIP = 1 << 9  # elements that each loop of the adding pass visits before the next one does, for the same reason
LIMIT_BITS = (127 + 100) << 23  # 2^100, see reference.limit
ORDINARY_BITS = (127 + 84) << 23  # 2^84, see reference.is_ordinary


def array_of(x: Tensor) -> Any:
    """Return the memory of ``x`` as an array."""
    return (x.detach() if x.requires_grad else x).numpy()


def bits_of(x: Tensor) -> Any:
    """Return the memory of contiguous float32 ``x`` (numel,) as int32."""
    return array_of(x).view(np.int32)


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
    return above_thresholds(x, np.array([[0, x.numel()]]), np.array([threshold]))


def above_thresholds(x: Tensor, pieces: Any, thresholds: Any) -> tuple[Tensor, Tensor]:
    """Do the same with a threshold for each piece, both arrays."""
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


def absorb_(residual: Tensor, grad: Tensor) -> int | None:
    """Add contiguous float32 ``grad`` (numel,) to ``residual`` and set it to zero; see micro.kernels."""
    target, source = array_of(residual), array_of(grad)
    target_bits, source_bits = target.view(np.int32), source.view(np.int32)

    def absorb(a: int, b: int) -> tuple[int, int]:
        return a + int(absorb_and_clear(target[a:b], target_bits[a:b], source[a:b], source_bits[a:b])), a

    for place, start in in_parts(absorb, grad.numel(), unit=TILE, moved=16):
        if place >= start:
            return place
    return None


def collect(x: Tensor, start: int, lowest: int, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices, magnitudes and counts by bin of what reaches ``lowest``; see micro.kernels."""
    places, bits = scan(bits_of(x), np.array([[0, x.numel()]]), np.array([lowest], np.int32))
    counts = _binned(places, bits, np.int32(start), np.int32(lowest), np.int32(shift))
    return torch.from_numpy(places), torch.from_numpy(bits.view(np.float32)), torch.from_numpy(counts)


@jitted
def _binned(places: Any, bits: Any, start: Any, lowest: Any, shift: Any) -> Any:
    """Add ``start`` to the places, and return (NUM_BINS,) int32 how many candidates each bin has."""
    counts = np.zeros(NUM_BINS, np.int32)
    for i in range(bits.size):
        places[i] += start
        counts[min((bits[i] - lowest) >> shift, NUM_BINS - 1)] += 1
    return counts


def keep(indices: Tensor, magnitudes: Tensor, count: int, bottom: int, top: int, share: int) -> Tensor:
    """Return the indices of what is kept; see micro.kernels."""
    kept = np.empty(count + 1, np.int32)
    _keep(kept, indices.numpy(), bits_of(magnitudes), np.int32(bottom), np.int32(top), np.int64(share))
    return torch.from_numpy(kept[:count])  # an empty array of numpy's has a stride that torch refuses later


@jitted
def _keep(kept: Any, indices: Any, bits: Any, bottom: Any, top: Any, share: Any) -> None:
    """Write what is kept, and behind it one that is not: without a branch, which would be guessed wrong half the time.

    Of those that equal the smallest the first are kept.
    """
    smallest, ties = top - np.int32(1), 0
    if share:
        inside = _between(bits, bottom, top)
        smallest = np.partition(inside, inside.size - share)[inside.size - share]
        ties = share - (inside > smallest).sum()
    count, first = 0, 0
    while ties:
        kept[count] = indices[first]
        count += bits[first] >= smallest
        ties -= bits[first] == smallest
        first += 1
    for i in range(first, bits.size):
        kept[count] = indices[i]
        count += bits[i] > smallest


@jitted
def _between(bits: Any, bottom: Any, top: Any) -> Any:
    found, count = np.empty(bits.size + 1, np.int32), 0
    for i in range(bits.size):
        found[count] = bits[i]
        count += (bits[i] >= bottom) & (bits[i] < top)
    return found[:count]


@jitted
def highest_bits(bits: Any) -> Any:
    """Return the bit pattern of the largest magnitude, of NaN where there is one."""
    highest = np.int32(0)
    for i in range(bits.size):
        highest = max(highest, bits[i] & np.int32(MAGNITUDE_BITS))
    return np.int32(highest)


@jitted
def _drop_nonfinite(source: Any, source_bits: Any) -> Any:
    """Set what is NaN or infinite to zero; return its first place, or -1."""
    first_bad = -1
    for i in range(source.size):
        if source_bits[i] & INFINITY_BITS == INFINITY_BITS:
            first_bad = i if first_bad < 0 else first_bad
            source[i] = 0
    return first_bad


@jitted
def drop_too_large(target: Any, target_bits: Any, first_bad: Any) -> Any:
    """Set sums that are too large to zero; return their first place, or ``first_bad`` where that comes before."""
    for i in range(target.size):
        if target_bits[i] & MAGNITUDE_BITS >= LIMIT_BITS:
            first_bad = i if first_bad < 0 else min(first_bad, i)
            target[i] = 0
    return first_bad


@jitted
def absorb_tile(target: Any, target_bits: Any, source: Any, source_bits: Any) -> Any:
    """Add a tile's gradient to its residual; return the place of the first sum that is too large, or -1."""
    highest = highest_bits(source_bits)
    first_bad = _drop_nonfinite(source, source_bits) if highest >= INFINITY_BITS else -1
    for i in range(source.size):
        target[i] += source[i]
    return drop_too_large(target, target_bits, first_bad) if highest >= ORDINARY_BITS else first_bad


@jitted
def absorb_and_clear(target: Any, target_bits: Any, source: Any, source_bits: Any) -> Any:
    """Do the same with any number of tiles, and set the gradient to zero."""
    first_bad = -1
    for start in range(0, source.size, STRIP):
        end = min(start + STRIP, source.size)
        gradient = source[start:end]
        bad = absorb_tile(target[start:end], target_bits[start:end], gradient, source_bits[start:end])
        gradient[:] = 0
        first_bad = start + bad if first_bad < 0 <= bad else first_bad
    return first_bad
