"""DEFT: top-k in every layer, more of it where the norm is larger, and the layers shared out among the ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.partition import layer_pieces
from micro.parts import NoState, Rule, check_rule
from micro.selectors.base import Selector
from micro.selectors.pieces import largest_of_each, pieces_at
from micro.sparse import Overlap, Selection, Step

Piece = tuple[int, int]  # (start, stop) in the flat vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Deft(Selector[NoState]):
    """Select the largest magnitudes of every layer, as many as its share of the norms; each rank serves some layers.

    A layer longer than numel / world_size is cut into world_size pieces. Each piece gets its part of k by its L2 norm,
    and the pieces are packed into world_size bins of about equal cost, size * log2(k) each, that rotate among the
    ranks. Index sets never overlap, so nothing builds up. Costs per step: the norms of the whole vector on every rank,
    and exact top-k in about 1 / world_size of it. Bytes beyond those of the exchange, for L pieces: all-reduce of 8 L
    ('repaired'); broadcast of 4 (L + world_size), all-gather of 4 ('published').

    Args:
        rule: 'published', the authors' public code step for step: every rank derives the numbers of its pieces from its
            own norms, largest norm first, at least 1 each; rank step % world_size packs by its own numbers and
            broadcasts the bins. What comes out is k but approximately. 'repaired': the ranks sum their norms, so that
            all derive the same numbers and bins without a broadcast or an exchange of counts; what a full piece leaves
            over goes to the others and no piece is forced upon the budget, so that exactly min(k, numel) come out. By
            length instead where norms say nothing (all zero, or beyond the largest number).

    A piece of which everything is wanted is searched by nobody: the code's ranks all append it to the union by
    themselves. Here one rank, in turn ('published') or with the shortest list ('repaired'), names its indices for all,
    which gives the same update and keeps index sets disjoint, at 4 bytes per index.

    Source: Yoon and Oh, DEFT, ICPP 2023, arXiv 2307.03500, and its public code as it was after unspent budget ceased to
    be handed out. Differences of 'repaired': see above. Differences of 'published': one rank alone sends wholly wanted
    pieces, too (the code never does); pieces without elements are left out, and norms that are infinite earn a piece 1
    index (the code fails at both); among equal norms the later piece comes first (the code: unspecified). Both: int32
    indices; ties of magnitude go to the lowest index; k is at least 1.

    Raises:
        ValueError: no such rule.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "deft"
    overlap: ClassVar[Overlap] = Overlap.DISJOINT
    needs_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rule(self)

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return the largest of each piece in the bin that is this rank's turn."""
        pieces, n = layer_pieces(step.layout.numels, comm.world_size), comm.world_size
        plan = (_plan_published if self.rule == "published" else _plan_repaired)(acc, pieces, step, comm)
        bins = [plan.bins[(step.index + rank) % n] for rank in range(n)]
        mine = sorted(piece for piece in bins[comm.rank] if plan.wanted[piece])
        spans = pieces_at(tuple(pieces[piece] for piece in mine), str(acc.device))
        indices = largest_of_each(acc, spans, [plan.wanted[piece] for piece in mine])
        counts = tuple(sum(plan.wanted[piece] for piece in bin) for bin in bins) if plan.is_shared else None
        return Selection(indices, counts=counts)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Pieces by bin, the same on all ranks; how many to take of each; whether those numbers are the same as well."""

    bins: list[list[int]]
    wanted: list[int]
    is_shared: bool


def _plan_repaired(acc: Tensor, pieces: Sequence[Piece], step: Step, comm: Comm) -> _Plan:
    sizes = [stop - start for start, stop in pieces]
    norms = comm.all_reduce_(_norms(acc, sizes).to(torch.float64), "counts").tolist()  # host sync: the plan
    wanted = share_out(step.target_count, norms, sizes)
    bins, whole = _pack(sizes, wanted, comm.world_size)
    lengths = [sum(wanted[piece] for piece in bin) for bin in bins]
    for piece in whole:
        shortest = lengths.index(min(lengths))
        bins[shortest].append(piece)
        lengths[shortest] += wanted[piece]
    return _Plan(bins, wanted, is_shared=True)


def _plan_published(acc: Tensor, pieces: Sequence[Piece], step: Step, comm: Comm) -> _Plan:
    sizes, n = [stop - start for start, stop in pieces], comm.world_size
    norms = _norms(acc, sizes).tolist()  # host sync: the numbers of the pieces
    wanted = _share_out_published(step.target_count, norms, sizes)
    coordinator = step.index % n
    message = torch.zeros(n + len(pieces), dtype=torch.int32)
    if comm.rank == coordinator:
        bins, whole = _pack(sizes, wanted, n)
        lengths = [len(bin) for bin in bins]
        message = torch.tensor([*lengths, *(piece for bin in [*bins, whole] for piece in bin)], dtype=torch.int32)
    told = comm.broadcast_(message.to(acc.device), coordinator, "counts").tolist()  # host sync: the coordinator's plan
    edges = [*accumulate(told[:n], initial=n)]
    bins = [told[start : start + length] for start, length in zip(edges, told[:n], strict=False)]
    for turn, piece in enumerate(told[edges[-1] :]):
        bins[turn % n].append(piece)
        wanted[piece] = sizes[piece]
    return _Plan(bins, wanted, is_shared=False)


def _norms(acc: Tensor, sizes: list[int]) -> Tensor:
    """Return the L2 norm of each piece (L,), in the dtype of ``acc``: one read, nothing copied."""
    return torch.stack(torch._foreach_norm(acc.split(sizes)))


def share_out(budget: int, norms: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return how many to take of each piece: by its part of the norms, largest first, and min(budget, all) in sum.

    What rounding and full pieces leave over rolls on to the smaller norms, and from the last one back to the start.
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


def _share_out_published(budget: int, norms: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return how many a rank takes of each piece by its own norms; the order of operations is the code's."""
    wanted, total = [0] * len(sizes), sum(norms)
    for i in sorted(range(len(sizes)), key=lambda i: (norms[i], i), reverse=True):
        share = norms[i] / total if total > 0 else 0.0
        count = int(budget * share) if math.isfinite(share) else 0
        wanted[i] = sizes[i] if sizes[i] < count else max(1, count)
        budget -= wanted[i]
        total -= norms[i]
    return wanted


def _pack(sizes: Sequence[int], wanted: Sequence[int], num_bins: int) -> tuple[list[list[int]], list[int]]:
    """Return the pieces in each bin, the costliest first into the bin with the least so far, and those wholly wanted.

    Ties go to the first piece and the first bin. Pieces of which nothing is wanted are in no bin.
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
