"""The selector deft (DEFT): top-k in every layer, in proportion to its norm; each rank searches some of the layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Broadcast, Once, Reduction, known
from micro.parts import NoState, Rule, check_rule
from micro.predicted_traffic import COUNT_BYTES, Choosing
from micro.selectors.base import Selector, Traits
from micro.selectors.pieces import largest_of_each, pieces_at
from micro.values.flat import Layout
from micro.values.norms import norms_of, rows_of
from micro.values.sparse import Overlap, Selection, Step, equal_slice

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deft(Selector[NoState]):
    """Select the largest magnitudes of every layer, in proportion to its norm; each rank searches some layers.

    A layer longer than numel / world_size is cut into world_size pieces. Each piece gets a part of k in proportion to
    its L2 norm. The pieces are packed into world_size bins of about equal cost, the sum of size * log2(count), that
    rotate among the ranks. Index sets never overlap, so there is no build-up.

    Costs per step: the norms of the whole vector on every rank, and exact top-k in about 1 / world_size of it. Bytes
    beyond those of the exchange, for L pieces: an all-reduce of 8 L; as published, a broadcast of 4 (L + world_size),
    and an all-gather of 4 for the counts.

    Args:
        rule: 'repaired': the ranks sum their norms, so all derive the same counts; the surplus of a full piece goes to
            others, so exactly min(k, numel) are selected. If all norms are zero, or one is infinite, lengths replace
            them. 'published': each rank derives the counts of its pieces from its own norms, at least 1 each, and rank
            step % world_size packs bins by its own counts and broadcasts them; about k are selected in all.

    Source: Yoon and Oh, DEFT, ICPP 2023, arXiv 2307.03500, and its public code, in the version without redistribution
    of unspent budget. Differences of both rules: one rank sends the indices of a fully selected piece (in the code
    every rank appends them to the union), which costs 4 bytes per index and keeps index sets disjoint; int32 indices;
    ties go to the lowest index; k is at least 1. Repaired: summed norms instead of a broadcast plan; no piece exceeds
    its budget. Published: a single rank also sends fully selected pieces (code: never); empty pieces are left out, and
    an infinite norm gives a piece 1 index (the code fails at both); among equal norms the later piece comes first
    (code: unspecified).

    Raises:
        ValueError: no such rule.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "deft"
    overlap: ClassVar[Overlap] = Overlap.DISJOINT
    traits: ClassVar[Traits] = Traits.ALL_PARAMETERS

    def __post_init__(self) -> None:
        check_rule(self)

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the largest magnitudes of each piece in this rank's bin of the step."""
        n = comm.world_size
        pieces, sizes, rows = step.layout.kept(_pieces, n)
        planned = _plan if self.rule == "repaired" else _published_plan
        plan = yield from planned(norms_of(acc, rows), sizes, step, comm)
        wanted = plan.wanted
        mine = sorted(piece for piece in plan.bins[(step.index + comm.rank) % n] if wanted[piece])
        places = pieces_at([pieces[piece] for piece in mine], acc.device)
        indices = largest_of_each(acc, places, [wanted[piece] for piece in mine])
        return Selection(indices, counts=plan.counts(step.index) if self.rule == "repaired" else None)

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the all-reduce of norms, or as published the broadcast of the plan; see Selector."""
        num_pieces = len(layer_pieces(layout.numels, world_size))
        if self.rule == "published":
            return Choosing(calls=(("broadcast", COUNT_BYTES * (num_pieces + world_size)),))
        return Choosing(calls=(("all_reduce", 8 * num_pieces),), knows_counts=True)  # the norms, in float64


class Plan(NamedTuple):
    """The number of indices per piece, and the pieces of each bin."""

    wanted: list[int]
    bins: list[list[int]]

    def counts(self, step: int) -> tuple[int, ...]:
        """Return the number of indices per rank at a step, if all ranks have the same plan."""
        n = len(self.bins)
        return tuple(sum(self.wanted[piece] for piece in self.bins[(step + rank) % n]) for rank in range(n))


def _plan(norms: Tensor, sizes: Sequence[int], step: Step, comm: Comm) -> Reduction[Plan]:
    """Return the plan from the ranks' summed norms, equal on all ranks."""
    (total,) = yield from known((yield AllReduce(mine=norms.to(torch.float64), kind="counts")))
    plan: Plan = yield Once(work=lambda: _plan_of(step.target_count, total.tolist(), sizes, comm.world_size))
    return plan


def _plan_of(budget: int, norms: Sequence[float], sizes: Sequence[int], world_size: int) -> Plan:
    wanted = share_out(budget, norms, sizes)
    bins, whole = pack(sizes, wanted, world_size)
    lengths = [sum(wanted[piece] for piece in bin) for bin in bins]
    for piece in whole:  # goes to the bin with the shortest list so far
        shortest = lengths.index(min(lengths))
        bins[shortest].append(piece)
        lengths[shortest] += wanted[piece]
    return Plan(wanted, bins)


def _published_plan(norms: Tensor, sizes: Sequence[int], step: Step, comm: Comm) -> Reduction[Plan]:
    """Return this rank's counts, and the bins that one rank packs by its own counts and broadcasts."""
    n, coordinator = comm.world_size, step.index % comm.world_size
    wanted = published_counts(step.target_count, norms.tolist(), sizes)  # host sync: the counts
    message = torch.zeros(n + len(sizes), dtype=torch.int32)
    if comm.rank == coordinator:
        bins, whole = pack(sizes, wanted, n)
        lengths = [len(bin) for bin in bins]
        message = torch.tensor([*lengths, *(piece for bin in [*bins, whole] for piece in bin)], dtype=torch.int32)
    sent = yield Broadcast(mine=message.to(norms.device), source=coordinator, kind="counts")
    received = sent.tolist()  # host sync: the plan
    edges = [*accumulate(received[:n], initial=n)]
    bins = [received[start : start + length] for start, length in zip(edges, received[:n], strict=False)]
    for turn, piece in enumerate(received[edges[-1] :]):  # fully selected pieces
        bins[turn % n].append(piece)
        wanted[piece] = sizes[piece]
    return Plan(wanted, bins)


def _pieces(layout: Layout, world_size: int) -> tuple[Pairs, list[int], Pairs]:
    """Return the pieces, their sizes, and the runs of equal ones."""
    pieces = layer_pieces(layout.numels, world_size)
    sizes = [stop - start for start, stop in pieces]
    return pieces, sizes, rows_of(sizes)


def layer_pieces(numels: tuple[int, ...], world_size: int) -> Pairs:
    """Return (start, stop) of every layer; one longer than its fair share is cut into ``world_size`` equal slices.

    A share is sum(numels) / world_size. Layers and slices without elements are left out.
    """
    numel, first, pieces = sum(numels), 0, []
    for size in numels:
        parts = world_size if size * world_size > numel else 1
        pieces += [(first + start, first + stop) for start, stop in (equal_slice(size, parts, p) for p in range(parts))]
        first += size
    return tuple((start, stop) for start, stop in pieces if stop > start)


def pack(sizes: Sequence[int], wanted: Sequence[int], num_bins: int) -> tuple[list[list[int]], list[int]]:
    """Return the pieces in each bin, and the fully selected ones, which are in none.

    The costliest piece goes first, into the bin with the least cost so far. Ties go to the first piece and the first
    bin. Pieces without selected elements are left out.
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


def share_out(budget: int, norms: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return the number of indices per piece, in proportion to norms, largest first, with sum min(budget, all).

    The surplus of rounding and of full pieces goes to smaller norms, and after the last one back to the largest.
    """
    taken = [0] * len(sizes)
    weights = list(norms) if math.isfinite(sum(norms)) else list(map(float, sizes))
    while budget:
        weights = [w if taken[i] < sizes[i] else 0.0 for i, w in enumerate(weights)]
        if not any(weights):  # no norms left: in proportion to free room
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


def published_counts(budget: int, norms: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return a rank's number of indices per piece from its own norms, with the public code's order of operations."""
    wanted, total = [0] * len(sizes), sum(norms)
    for norm, i in sorted(zip(norms, range(len(sizes)), strict=True), reverse=True):
        share = norm / total if total > 0 else 0.0
        count = int(budget * share) if math.isfinite(share) else 0
        wanted[i] = min(max(count, 1), sizes[i])
        budget -= wanted[i]
        total -= norm
    return wanted
