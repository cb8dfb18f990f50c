"""The largest magnitudes of each of many pieces of a vector, all at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from micro import kernels
from micro.kernels.reference import places_of
from micro.selectors.piece_tables import Table, largest_in_tables, tables_of
from micro.values.on_device import to_device

LONGEST_IN_TABLES = 1 << 15
SAMPLE = 1 << 10  # elements of a piece from which its threshold is guessed; a wrong guess costs time, never exactness


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a vector.

    Attributes:
        edges: the start and the stop of each, ascending, not overlapping.
        spans: (S, 2) int64 the same on the device.
        longest: number of elements of the longest piece.
        on_host: (S, 2) the spans on the CPU.
        tables: of the pieces where they are short and on an accelerator; else none.
    """

    edges: tuple[tuple[int, int], ...]
    spans: Tensor
    longest: int
    on_host: Tensor
    tables: tuple[Table, ...] = ()

    @property
    def lengths(self) -> Tensor:
        """Number of elements of each piece (S,)."""
        return self.spans[:, 1] - self.spans[:, 0]


@lru_cache(maxsize=64)
def pieces_at(spans: tuple[tuple[int, int], ...], device: str = "cpu") -> Pieces:
    """Return the pieces with these starts and stops."""
    edges = torch.tensor(spans, dtype=torch.int64).view(-1, 2)
    longest = max((stop - start for start, stop in spans), default=0)
    in_tables = torch.device(device).type != "cpu" and longest <= LONGEST_IN_TABLES
    tables = tables_of(spans, device) if in_tables else ()
    return Pieces(spans, edges.to(device), longest, edges, tables)


@lru_cache(maxsize=64)
def pieces_of(numels: tuple[int, ...], device: str = "cpu") -> Pieces:
    """Return the pieces of these lengths that follow each other from the start on."""
    return pieces_at(tuple(pairwise(accumulate(numels, initial=0))), device)


def largest_of_each(x: Tensor, pieces: Pieces, counts: Tensor | Sequence[int]) -> Tensor:
    """Return the ascending int32 indices of the ``counts[s]`` largest magnitudes of each piece; ties to the lowest.

    Exact. Short pieces on an accelerator are chosen from side by side, and its host waits for nothing. Else a sample
    of each guesses its threshold, one scan collects what is above in all pieces, and what is too many is cut among
    those; pieces that were guessed too high are collected whole in a second scan.

    Args:
        x: (numel,), on an accelerator without NaN.
        counts: (S,) whole numbers, on the CPU; more than a piece has means all of it.
    """
    wanted = torch.as_tensor(counts, dtype=torch.int64).minimum(pieces.on_host[:, 1] - pieces.on_host[:, 0])
    if x.device.type != "cpu" and pieces.longest <= LONGEST_IN_TABLES:
        return largest_in_tables(x, pieces.tables, wanted)
    counts = to_device(wanted, x.device)
    thresholds = _guess(x, pieces, counts)
    candidates, magnitudes = kernels.above_by_piece(x, pieces.spans, thresholds)
    found = _counts(candidates, pieces.spans)
    missing = found < counts
    if missing.any():  # host sync: rarely more than once in many steps
        thresholds[missing] = 0.0
        candidates, magnitudes = kernels.above_by_piece(x, pieces.spans, thresholds)
        found = _counts(candidates, pieces.spans)
    return candidates.index_select(0, _best(magnitudes, found, counts, int(wanted.sum())))


def _guess(x: Tensor, pieces: Pieces, counts: Tensor) -> Tensor:
    """Return thresholds (S,) that a few more than ``counts`` elements should reach; 0 where all might be needed."""
    sample, taken = _sample(pieces.edges, str(x.device))
    expected = taken * counts / pieces.lengths.clamp(min=1)
    ranks = (expected + 3 * expected.sqrt() + 1).ceil().to(torch.int64)
    ranks = torch.where(counts > 0, ranks, 0)
    return kernels.kth_by_run(x.index_select(0, sample).abs(), taken, ranks)


@lru_cache(maxsize=64)
def _sample(spans: tuple[tuple[int, int], ...], device: str) -> tuple[Tensor, Tensor]:
    """Return places (M,) int64, ascending: at most SAMPLE of each piece, evenly spread; and how many of each (S,)."""
    edges = torch.tensor(spans, dtype=torch.int64).view(-1, 2)
    lengths = edges[:, 1] - edges[:, 0]
    taken = lengths.clamp(max=SAMPLE)
    within = torch.arange(int(taken.sum())) - (taken.cumsum(0) - taken).repeat_interleave(taken)
    stride = torch.div(lengths, taken.clamp(min=1), rounding_mode="floor")
    sample = edges[:, 0].repeat_interleave(taken) + within * stride.repeat_interleave(taken)
    return sample.to(device), taken.to(device)


def _counts(candidates: Tensor, spans: Tensor) -> Tensor:
    return torch.searchsorted(candidates, spans.to(torch.int32)).diff(dim=1).view(-1)


def _best(magnitudes: Tensor, found: Tensor, counts: Tensor, total: int) -> Tensor:
    """Return the ascending places (total,) of the ``counts`` largest of each run of ``found``; ties to the lowest."""
    size = magnitudes.numel()
    cuts = kernels.kth_by_run(magnitudes, found, counts).repeat_interleave(found, output_size=size)
    above, tied = magnitudes > cuts, magnitudes == cuts
    owner = torch.arange(found.numel(), device=found.device).repeat_interleave(found, output_size=size)
    room = counts - torch.zeros_like(counts).index_add_(0, owner, above.to(torch.int64))
    seen = tied.cumsum(0)
    starts = found.cumsum(0) - found
    before = torch.cat([seen.new_zeros(1), seen])[starts]
    return places_of(above | (tied & (seen - before[owner] <= room[owner])), total)
