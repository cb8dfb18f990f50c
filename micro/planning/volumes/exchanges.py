"""The collectives of an exchange: how what was chosen becomes an update that all ranks know."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from micro.exchanges.in_pieces import InPieces
from micro.exchanges.oktopk import NUM_SUM_BINS
from micro.exchanges.sums_in_rows import capacity_for, fits, row_bytes
from micro.index_codecs import Int32
from micro.operations import PADDING
from micro.planning.volumes.calls import COUNT_BYTES, Call, Calls
from micro.planning.volumes.sparse_step import SparseStep
from micro.selectors.base import Traits
from micro.sparse import Overlap

NEAR_SHARE = 0.25  # Ok-Topk: sums in the bin of the k-th, to those chosen: 0.1 to 0.5 on independent normal gradients


def calls_of_exchange(step: SparseStep) -> Calls:
    """Return the collectives that exchanging what was chosen takes."""
    if isinstance(step.exchange, InPieces):
        return _of_pieces(step, step.exchange)
    if step.exchange.name not in _EXCHANGES:
        raise ValueError(f"what exchange {step.exchange.name} sends is not known: state it in micro.planning.volumes")
    return _EXCHANGES[step.exchange.name](step)


def _of_pieces(step: SparseStep, exchange: InPieces) -> Calls:
    """Return the calls of all pieces in turn; what was chosen is taken to lie evenly over them."""
    pieces = exchange.pieces(torch.empty(step.numel, dtype=step.dtype, device="meta"))
    if len(pieces) == 1:
        return calls_of_exchange(replace(step, exchange=exchange.each))
    calls: list[Call] = []
    for start, stop in pieces:
        share = (stop - start) / step.numel
        piece = replace(
            step,
            exchange=exchange.each,
            numel=stop - start,
            k=round(share * step.k),
            chosen=share * step.chosen,
            longest=share * step.longest,
            total=share * step.total,
            knows_counts=step.selector.overlap is Overlap.SAME,
            has_ranges=False,
        )
        calls += calls_of_exchange(piece)
    return tuple(calls)


def _of_union(step: SparseStep) -> Calls:
    counts: Calls = () if step.knows_counts else (("gather_rows", COUNT_BYTES),)
    return *counts, *_of_indices(step), *_of_mean(step)


def _of_indices(step: SparseStep) -> Calls:
    """Return how the ranks' indices are made known: not at all where all hold the same."""
    overlap = step.selector.overlap
    if overlap is Overlap.SAME or Traits.SENDS_INDICES in step.selector.traits:
        return ()
    if overlap is Overlap.LEADER:
        return (("broadcast", step.indices(step.total, step.numel)),)
    span = step.numel / step.world_size if step.has_ranges else step.numel
    return (("gather_lists", step.indices(_sent_of(step), span)),)


def _sent_of(step: SparseStep) -> float:
    """Return how many elements each rank sends of those chosen: as many as the busiest where lists are padded."""
    is_padded = step.world_size > 2 and step.longest <= PADDING * step.chosen
    return step.longest if is_padded else step.chosen


def _of_mean(step: SparseStep) -> Calls:
    """Return how one value of each rank at every shared index becomes their mean; a finite flag travels along."""
    n = step.world_size
    if step.reducer.codec.lossless:
        return (("all_reduce", (round(step.total) + 1) * step.dtype.itemsize),)
    part = step.values(step.total / n)
    return ("scatter", (n - 1) * part), ("gather_lists", part + 1)


def _of_gather(step: SparseStep) -> Calls:
    header: Call = ("gather_rows", 2 * COUNT_BYTES)
    return header, *_of_indices(step), ("gather_lists", step.values(_sent_of(step)))


def _of_gtopk(step: SparseStep) -> Calls:
    n, length = step.world_size, min(step.k, step.numel)
    pairs = 16 * length if step.is_published else step.indices(length, step.numel) + step.values(length)
    distances = [1 << place for place in range((n - 1).bit_length())]
    up: Calls = tuple(("scatter", COUNT_BYTES * (1 + min(far, n - far)) + pairs) for far in distances)
    return *up, ("broadcast", COUNT_BYTES * (1 + n) + pairs)


def _of_dsa(step: SparseStep) -> Calls:
    n = step.world_size
    entries = step.chosen - 1 if step.is_published else step.chosen  # its rule keeps back the smallest
    indices, values = step.indices(step.total / n, step.numel / n), step.values(step.total / n)
    region = step.values(step.numel / n)
    dense = 3 * step.total >= step.numel if step.is_published else region < indices + values
    sums: Calls = (("gather_lists", region),) if dense else (("gather_lists", indices), ("gather_lists", values))
    return *_to_regions(step, entries), ("gather_rows", 3 * COUNT_BYTES), *sums


def _of_oktopk(step: SparseStep) -> Calls:
    held, width = step.total / step.world_size, step.dtype.itemsize
    capacity = capacity_for(held + math.sqrt(held))  # regions follow what is chosen: the most is little above the mean
    in_rows = not step.is_published and isinstance(step.reducer.indices, Int32)
    if in_rows and fits(capacity, step.total, step.world_size):
        return *_to_regions(step, step.chosen), ("gather_rows", row_bytes(capacity, width))
    counts: Calls = (("gather_rows", 3 * COUNT_BYTES),)
    if not step.is_published:  # a histogram, then the sums near the k-th
        near = NEAR_SHARE * held * width
        counts = ("gather_rows", COUNT_BYTES * (NUM_SUM_BINS + 2)), ("gather_lists", near)
    indices, values = step.indices(held, step.numel / step.world_size), step.values(held)
    return *_to_regions(step, step.chosen), *counts, ("gather_lists", indices), ("gather_lists", values)


def _to_regions(step: SparseStep, entries: float) -> Calls:
    """Return how every entry reaches the rank that owns its region."""
    n = step.world_size
    return (
        ("scatter", COUNT_BYTES * (n - 1)),
        ("scatter", (n - 1) * (step.indices(entries / n, step.numel / n) + step.values(entries / n))),
    )


_EXCHANGES: Mapping[str, Callable[[SparseStep], Calls]] = {
    "union": _of_union,
    "gather": _of_gather,
    "gtopk": _of_gtopk,
    "dsa": _of_dsa,
    "oktopk": _of_oktopk,
}
