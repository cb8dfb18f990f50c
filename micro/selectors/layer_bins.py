"""Pieces of layers in bins of about equal cost, one bin for each rank: what DEFT's two rules share."""

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace

from torch import Tensor

from micro.selectors.pieces import largest_of_each, pieces_at

Piece = tuple[int, int]  # (start, stop) in the flat vector


def pack(sizes: Sequence[int], wanted: Sequence[int], num_bins: int) -> tuple[list[list[int]], list[int]]:
    """Return the pieces in each bin, and those that are wanted whole, which are in none.

    The costliest piece goes first, into the bin with the least cost so far. Ties go to the first piece and the first
    bin. Pieces of which nothing is wanted are left out.
    """
    costs = [size * math.log2(count) if count > 1 else size for size, count in zip(sizes, wanted, strict=True)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    whole, loads = [], [(0.0, bin) for bin in range(num_bins)]
    heapify(loads)
    for piece in sorted(range(len(sizes)), key=lambda piece: (-costs[piece], piece)):
        if wanted[piece] == sizes[piece]:
            whole.append(piece)
        elif wanted[piece]:
            load, bin = loads[0]
            bins[bin].append(piece)
            heapreplace(loads, (load + costs[piece], bin))
    return bins, whole


def largest_in_bins(acc: Tensor, pieces: Sequence[Piece], wanted: Sequence[int], bin: Sequence[int]) -> Tensor:
    """Return the ascending int32 indices of the ``wanted`` largest magnitudes of each piece in ``bin``."""
    mine = sorted(piece for piece in bin if wanted[piece])
    spans = pieces_at(tuple(pieces[piece] for piece in mine), str(acc.device))
    return largest_of_each(acc, spans, [wanted[piece] for piece in mine])
