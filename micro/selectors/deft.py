"""DEFT: top-k in every layer, more of it where the norm is larger; each rank searches some of the layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.norms import norms_of
from micro.partition import layer_piece_sizes, layer_pieces
from micro.parts import NoState
from micro.requests import AllReduce, Once, Reduction
from micro.selectors.base import Selector
from micro.selectors.layer_bins import largest_in_bins, pack
from micro.sparse import Overlap, Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Deft(Selector[NoState]):
    """Select the largest magnitudes of every layer, as many as its share of the norms; each rank searches some layers.

    A layer longer than numel / world_size is cut into world_size pieces. Each piece gets its part of k by its L2 norm.
    The ranks sum their norms, so that all derive the same counts; what a full piece leaves over goes to the others, so
    that exactly min(k, numel) are selected. Where norms say nothing (all zero, or infinite), lengths take their place.
    The pieces are packed into world_size bins of about equal cost, size * log2(count) each, that rotate among the
    ranks. Index sets never overlap, so there is no build-up.

    Costs per step: the norms of the whole vector on every rank, and exact top-k in about 1 / world_size of it. Bytes
    beyond those of the exchange, for L pieces: an all-reduce of 8 L.

    Source: Yoon and Oh, DEFT, ICPP 2023, arXiv 2307.03500, and its public code as it was after unspent budget ceased to
    be handed out. Differences: summed norms in place of a broadcast plan; no piece gets an index that the budget does
    not give it; of a piece that is wanted whole, the rank with the shortest list names the indices (in the code every
    rank appends them to the union by itself), which costs 4 bytes per index and keeps index sets disjoint; int32
    indices; ties of magnitude go to the lowest index; k is at least 1. `PublishedDeft` follows the public code.
    """

    name: ClassVar[str] = "deft"
    rule: ClassVar[str] = "repaired"
    overlap: ClassVar[Overlap] = Overlap.DISJOINT
    needs_all: ClassVar[bool] = True

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the largest of each piece in the bin that is this rank's in this step."""
        pieces = layer_pieces(step.layout.numels, comm.world_size)
        sizes = layer_piece_sizes(step.layout.numels, comm.world_size)
        norms = yield AllReduce(mine=norms_of(acc, sizes).to(torch.float64), kind="counts", read=True)
        wanted, bins, counts = yield Once(work=lambda: _shared_out(step, norms.tolist(), sizes, comm.world_size))
        return Selection(largest_in_bins(acc, pieces, wanted, bins[comm.rank]), counts=counts)


def _shared_out(
    step: Step, norms: Sequence[float], sizes: Sequence[int], world_size: int
) -> tuple[list[int], list[list[int]], tuple[int, ...]]:
    """Return how many to take of each piece, the pieces of each rank's bin, and how many each rank takes."""
    wanted = share_out(step.target_count, norms, sizes)
    filled = _fill(*pack(sizes, wanted, world_size), wanted)
    bins = [filled[(step.index + rank) % world_size] for rank in range(world_size)]
    return wanted, bins, tuple(sum(wanted[piece] for piece in bin) for bin in bins)


def share_out(budget: int, norms: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return how many to take of each piece: by its part of the norms, largest first, and min(budget, all) in sum.

    What rounding and full pieces leave over goes to the smaller norms, and from the last one back to the largest.
    """
    taken = [0] * len(sizes)
    weights = list(norms) if math.isfinite(sum(norms)) else list(map(float, sizes))
    while budget:
        weights = [w if taken[i] < sizes[i] else 0.0 for i, w in enumerate(weights)]
        if not any(weights):  # no norm is left: by the room there is
            weights = [float(size - count) for size, count in zip(sizes, taken, strict=True)]
        order = sorted((i for i, w in enumerate(weights) if w), key=lambda i: (-weights[i], i))
        if not order:
            return taken
        remaining = [*accumulate(weights[i] for i in reversed(order))][::-1]  # the last one's share is exactly 1
        for i, total in zip(order, remaining, strict=True):
            count = min(int(budget * (weights[i] / total)), sizes[i] - taken[i])
            taken[i] += count
            budget -= count
    return taken


def _fill(bins: list[list[int]], whole: list[int], wanted: Sequence[int]) -> list[list[int]]:
    """Return the bins with the pieces that are wanted ``whole``, each in the bin with the shortest list so far."""
    lengths = [sum(wanted[piece] for piece in bin) for bin in bins]
    for piece in whole:
        shortest = lengths.index(min(lengths))
        bins[shortest].append(piece)
        lengths[shortest] += wanted[piece]
    return bins
