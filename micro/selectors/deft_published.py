"""DEFT as in its public code: one rank plans for all, and every rank counts by its own norms."""

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
from micro.requests import Broadcast, Reduction
from micro.selectors.base import Selector
from micro.selectors.layer_bins import largest_in_bins, pack
from micro.sparse import Overlap, Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDeft(Selector[NoState]):
    """Select the largest magnitudes of every layer in bins that one rank plans: the public code step for step.

    Every rank derives the counts of its pieces from its own norms, largest norm first, at least 1 each; rank
    step % world_size packs by its own counts and broadcasts the bins. About k are selected in all. Bytes beyond those
    of the exchange, for L pieces: a broadcast of 4 (L + world_size), and an all-gather of 4 for the counts.

    Source: Yoon and Oh, DEFT, ICPP 2023, arXiv 2307.03500, and its public code as it was after unspent budget ceased to
    be handed out. Differences: of a piece that is wanted whole, one rank in turn names the indices (in the code every
    rank appends them to the union by itself), which gives the same update at 4 bytes per index and keeps index sets
    disjoint; a single rank sends such pieces too (the code: never); pieces without elements are left out, and an
    infinite norm earns a piece 1 index (the code fails at both); among equal norms the later piece comes first (the
    code: unspecified); int32 indices; ties of magnitude go to the lowest index; k is at least 1.
    """

    name: ClassVar[str] = "deft"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False
    overlap: ClassVar[Overlap] = Overlap.DISJOINT
    needs_all: ClassVar[bool] = True

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the largest of each piece in the bin that is this rank's in this step."""
        pieces, n = layer_pieces(step.layout.numels, comm.world_size), comm.world_size
        sizes = layer_piece_sizes(step.layout.numels, comm.world_size)
        norms = norms_of(acc, sizes).tolist()  # host sync: the counts
        wanted = _counts(step.target_count, norms, sizes)
        bins, whole = yield from _planned(sizes, wanted, step.index % n, comm, acc.device)
        for turn, piece in enumerate(whole):
            bins[turn % n].append(piece)
            wanted[piece] = sizes[piece]
        return Selection(largest_in_bins(acc, pieces, wanted, bins[(step.index + comm.rank) % n]))


def _counts(budget: int, norms: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return how many a rank takes of each piece by its own norms; the order of operations is the code's."""
    wanted, total = [0] * len(sizes), sum(norms)
    pairs = sorted(zip(norms, range(len(sizes)), strict=True), reverse=True)
    for norm, i in pairs:
        share = norm / total if total > 0 else 0.0
        count = int(budget * share) if math.isfinite(share) else 0
        taken = count if count > 1 else 1
        if taken > sizes[i]:
            taken = sizes[i]
        wanted[i] = taken
        budget -= taken
        total -= norm
    return wanted


def _planned(
    sizes: Sequence[int], wanted: Sequence[int], coordinator: int, comm: Comm, device: torch.device
) -> Reduction[tuple[list[list[int]], list[int]]]:
    """Return the coordinator's bins and the pieces that it wants whole, by one broadcast."""
    n = comm.world_size
    message = torch.zeros(n + len(sizes), dtype=torch.int32)
    if comm.rank == coordinator:
        bins, whole = pack(sizes, wanted, n)
        lengths = [len(bin) for bin in bins]
        message = torch.tensor([*lengths, *(piece for bin in [*bins, whole] for piece in bin)], dtype=torch.int32)
    plan = yield Broadcast(mine=message.to(device), source=coordinator, kind="counts")
    received = plan.tolist()  # host sync: the plan
    edges = [*accumulate(received[:n], initial=n)]
    bins = [received[start : start + length] for start, length in zip(edges, received[:n], strict=False)]
    return bins, received[edges[-1] :]
