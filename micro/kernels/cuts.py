"""A selection among slices that is cut by counts of magnitudes, compiled: loops over few numbers, one call each.

The functions do what those of `micro.kernels.cuts_reference` say, for float32 vectors on a CPU.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.interleaving import BlockRange
from micro.kernels.choosing import falling
from micro.kernels.cuts_reference import NUM_BINS, Cut, surely_kept
from micro.kernels.jit import INFINITY_BITS, array_of, as_bits, as_float, bits_of, jitted
from micro.kernels.scanning import scan, scan_blocks, scan_divided
from micro.scales import AnyScales, ElementScales, Scales

__all__ = ["collect", "collect_in_blocks", "collect_scaled", "cut", "keep", "kept_by_all", "message", "surely_kept"]


def collect(x: Tensor, start: int, lowest: int, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices, magnitudes and counts by bin of what reaches ``lowest``; see the reference."""
    found = scan(bits_of(x), np.array([[0, x.numel()]]), np.array([lowest], np.int32))
    return _counted(*found, start, lowest, shift)


def collect_in_blocks(
    x: Tensor, start: int, lowest: int, shift: int, blocks: BlockRange
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `collect` does for a copy of blocks of ``x``, without that copy."""
    found = scan_blocks(bits_of(x)[blocks.first :], blocks.block, blocks.apart, blocks.numel, lowest)
    return _counted(*found, start, lowest, shift)


def collect_scaled(x: Tensor, start: int, lowest: int, shift: int, scales: AnyScales) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `collect` does for a copy of ``x`` in ``scales``, without that copy."""
    collected = _multiplied if isinstance(scales, Scales) else _divided
    return _counted(*collected(x, np.int32(lowest), scales), start, lowest, shift)  # type: ignore[arg-type]


def _counted(places: Any, bits: Any, start: int, lowest: int, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    counts = _binned(places, bits, np.int32(start), np.int32(lowest), np.int32(shift))
    return torch.from_numpy(places), torch.from_numpy(bits.view(np.float32)), torch.from_numpy(counts)


def _divided(x: Tensor, lowest: Any, scales: ElementScales) -> tuple[Any, Any]:
    """Return places and bits of the magnitudes that reach ``lowest`` in units of their divisors."""
    return scan_divided(array_of(x), array_of(scales.roots), scales.factor, scales.eps, lowest)


def _multiplied(x: Tensor, lowest: Any, scales: Scales) -> tuple[Any, Any]:
    """Return places and bits of the magnitudes that reach ``lowest`` times the factors of their pieces."""
    edges, factors = scales.edges.numpy(), scales.factors.numpy().astype(np.float32)
    lowests = _reaching(lowest, factors)
    places, bits = scan(bits_of(x), np.stack([edges[:-1], edges[1:]], 1), lowests)
    _multiply(places, bits.view(np.float32), edges, factors)
    return places, bits


@jitted
def _reaching(lowest: Any, factors: Any) -> Any:
    """Return the bits of the smallest magnitudes (S,) whose products, rounded, have at least the bits ``lowest``."""
    smallest = np.empty(factors.size, np.int32)
    for piece in range(factors.size):
        low, high = np.int32(0), np.int32(INFINITY_BITS)
        while low < high:
            middle = np.int32((np.int64(low) + high) // 2)
            if as_bits(as_float(middle) * factors[piece]) >= lowest:
                high = middle
            else:
                low = np.int32(middle + 1)
        smallest[piece] = low
    return smallest


@jitted
def _multiply(places: Any, magnitudes: Any, edges: Any, factors: Any) -> Any:
    """Multiply the magnitudes at ascending places by the factors of their pieces, in place."""
    piece = 0
    for i in range(places.size):
        while places[i] >= edges[piece + 1]:
            piece += 1
        magnitudes[i] *= factors[piece]


@jitted
def _binned(places: Any, bits: Any, start: Any, lowest: Any, shift: Any) -> Any:
    """Add ``start`` to the places, and return (NUM_BINS,) int32 how many candidates each bin has."""
    counts = np.zeros(NUM_BINS, np.int32)
    for i in range(bits.size):
        places[i] += start
        counts[min((bits[i] - lowest) >> shift, NUM_BINS - 1)] += 1
    return counts


def cut(counts: Tensor, k: int) -> Cut:
    """Return where the k-th magnitude lies and how much each rank keeps; see the reference."""
    last, missing, inside, total, shares, taken = _cut(counts.numpy(), np.int64(k))
    return Cut(last, missing / inside if inside else 1.0, tuple(shares.tolist()), tuple(taken.tolist()), total)


@jitted
def _cut(counts: Any, k: Any) -> Any:
    n, last = counts.shape[0], NUM_BINS - 1
    totals = np.zeros(NUM_BINS, np.int64)
    for rank in range(n):
        for place in range(NUM_BINS):
            totals[place] += counts[rank, place]
    above = 0
    while last > 0 and above + totals[last] < k:
        above += totals[last]
        last -= 1
    inside = totals[last]
    missing = min(k - above, inside)
    shares = _shares(counts[:, last], missing, inside)
    taken = shares.copy()
    for rank in range(n):
        for place in range(last + 1, NUM_BINS):
            taken[rank] += counts[rank, place]
    return last, missing, inside, totals.sum(), shares, taken


@jitted
def _shares(counts: Any, missing: Any, inside: Any) -> Any:
    """Split ``missing`` in proportion to ``counts`` (n,), by largest remainder, low ranks first among equals."""
    shares = np.empty(counts.size, np.int64)
    if missing == inside:
        shares[:] = counts
        return shares
    rests = np.empty(counts.size, np.int64)
    left = missing
    for rank in range(counts.size):
        product = np.int64(counts[rank]) * missing
        shares[rank] = product // inside
        rests[rank] = shares[rank] * inside - product
        left -= shares[rank]
    if left:
        order = np.argsort(rests, kind="mergesort")
        for place in range(left):
            shares[order[place]] += 1
    return shares


def keep(indices: Tensor, magnitudes: Tensor, count: int, bottom: int, top: int, share: int) -> Tensor:
    """Return the indices of what is kept; see the reference."""
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


def message(
    found: tuple[Tensor, Tensor, Tensor], *, start: int, lowest: int, shift: int, sure: float, capacity: int, width: int
) -> Tensor:
    """Return a rank's counts and candidates as they travel; see the reference."""
    indices, magnitudes, counts = (array_of(part) for part in found)
    row = np.zeros(NUM_BINS + -(-capacity * width // 4), np.int32)
    row[:NUM_BINS] = counts
    numbers = np.int32(start), np.int32(lowest), np.int32(shift), float(sure), np.int64(capacity), np.int64(width)
    _write(row[NUM_BINS:].view(np.uint8), counts, indices, magnitudes.view(np.int32), *numbers)
    return torch.from_numpy(row)


@jitted
def _write(
    wire: Any,
    counts: Any,
    indices: Any,
    bits: Any,
    start: Any,
    lowest: Any,
    shift: Any,
    sure: Any,
    capacity: Any,
    width: Any,
) -> None:
    reached, first_sure, first = 0, NUM_BINS, 0
    for place in range(NUM_BINS - 1, -1, -1):
        reached += counts[place]
        if reached <= sure:
            first_sure = place
        if reached >= capacity:
            first = max(first, place)
    others, num_others, sent = np.empty(bits.size, np.int64), 0, 0
    for i in range(bits.size):
        at = min((bits[i] - lowest) >> shift, NUM_BINS - 1)
        if at >= first_sure:
            if sent < capacity:
                _put(wire, sent, indices[i] - start, width)
                sent += 1
        elif at >= first:
            others[num_others] = i
            num_others += 1
    order = falling(bits[others[:num_others]])
    for place in range(min(num_others, capacity - sent)):
        _put(wire, sent + place, indices[others[order[place]]] - start, width)


@jitted
def _put(wire: Any, place: Any, number: Any, width: Any) -> None:
    for byte in range(width):
        wire[place * width + byte] = (number >> (8 * byte)) & 255


def kept_by_all(
    rows: Tensor, counts: Tensor, sure: Tensor, taken: tuple[int, ...], starts: list[int], *, capacity: int, width: int
) -> Tensor | None:
    """Return what all ranks keep, from their messages; see the reference."""
    numbers = np.array(taken), np.array(starts, np.int32), np.int64(capacity), np.int64(width)
    is_held, kept = _read(rows.numpy(), counts.numpy(), sure.numpy(), *numbers)
    return torch.from_numpy(kept) if is_held else None


@jitted
def _read(rows: Any, counts: Any, sure: Any, taken: Any, starts: Any, capacity: Any, width: Any) -> Any:
    kept = np.empty(taken.sum() + 1, np.int32)
    done = 0
    for rank in range(taken.size):
        reached, fixed = 0, 0
        for place in range(NUM_BINS - 1, -1, -1):
            reached += counts[rank, place]
            if reached <= sure[rank]:
                fixed = reached
        if not fixed <= taken[rank] <= capacity:
            return False, kept
        wire = rows[rank][NUM_BINS:].view(np.uint8)
        for place in range(taken[rank]):
            number = starts[rank]
            for byte in range(width):
                number += np.int32(wire[place * width + byte]) << np.int32(8 * byte)
            kept[done] = number
            done += 1
    return True, kept[:done]
