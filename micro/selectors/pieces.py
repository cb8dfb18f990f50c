"""Select the largest magnitudes of each of many pieces of a vector at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from micro import kernels
from micro.kernels.reference import places_of
from micro.selectors.piece_tables import Table, largest_in_tables, tables_of
from micro.values.finite import to_device

CPU = torch.device("cpu")
LONGEST_IN_TABLES = 1 << 15
SAMPLE = 1 << 10  # sampled elements of a piece to guess its threshold; a wrong guess only costs time


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of a vector. A bucket's layout keeps them (`Layout.kept`), so they are computed once.

    Attributes:
        spans: (S, 2) int64 start and stop of each, on the CPU, ascending, not overlapping.
        device: of the vector.
    """

    spans: Tensor
    device: torch.device

    @cached_property
    def lengths(self) -> Tensor:
        """Number of elements of each piece (S,) on the CPU."""
        return self.spans[:, 1] - self.spans[:, 0]

    @cached_property
    def on_device(self) -> Tensor:
        """The spans (S, 2) on the device."""
        return to_device(self.spans, self.device)

    @cached_property
    def tables(self) -> tuple[Table, ...] | None:
        """The pieces as rows of tables if they are short and on an accelerator, otherwise None."""
        is_long = self.device.type == "cpu" or bool((self.lengths > LONGEST_IN_TABLES).any())
        return None if is_long else tables_of(self.spans, self.device)

    @cached_property
    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Evenly spread positions (M,) int64, at most SAMPLE per piece; their counts (S,); the pieces' lengths (S,).

        All are on the device; the length of an empty piece is given as 1.
        """
        taken, longer = self.lengths.clamp(max=SAMPLE), self.lengths.clamp(min=1)
        within = torch.arange(int(taken.sum())) - (taken.cumsum(0) - taken).repeat_interleave(taken)
        stride = torch.div(self.lengths, taken.clamp(min=1), rounding_mode="floor")
        places = self.spans[:, 0].repeat_interleave(taken) + within * stride.repeat_interleave(taken)
        return to_device(places, self.device), to_device(taken, self.device), to_device(longer, self.device)


def pieces_at(spans: Sequence[tuple[int, int]], device: torch.device = CPU) -> Pieces:
    """Return the pieces with these starts and stops."""
    return Pieces(torch.tensor(spans, dtype=torch.int64).view(-1, 2), device)


def pieces_of(numels: Sequence[int], device: torch.device = CPU) -> Pieces:
    """Return consecutive pieces of these lengths."""
    return pieces_at(list(pairwise(accumulate(numels, initial=0))), device)


def largest_of_each(x: Tensor, pieces: Pieces, counts: Tensor | Sequence[int]) -> Tensor:
    """Return the ascending int32 indices of the ``counts[s]`` largest magnitudes of each piece; ties to the lowest.

    Exact. Short pieces on an accelerator are processed in parallel, without waiting for it. Otherwise a sample of each
    piece guesses its threshold, one scan collects the elements above in all pieces, and surplus ones are removed;
    pieces with too high a guess are collected completely in a second scan.

    Args:
        x: (numel,), on an accelerator without NaN.
        counts: (S,) integers, on the CPU; limited to the lengths of the pieces.
    """
    wanted = torch.as_tensor(counts, dtype=torch.int64).minimum(pieces.lengths)
    if pieces.tables is not None:
        return largest_in_tables(x, pieces.tables, wanted)
    counts = to_device(wanted, x.device)
    thresholds = _guess_thresholds(x, pieces, counts)
    candidates, magnitudes = kernels.above_by_piece(x, pieces.on_device, thresholds)
    found = _counts(candidates, pieces.on_device)
    missing = found < counts
    if missing.any():  # host sync: rarely more than once in many steps
        thresholds[missing] = 0.0
        candidates, magnitudes = kernels.above_by_piece(x, pieces.on_device, thresholds)
        found = _counts(candidates, pieces.on_device)
    return candidates.index_select(0, _largest_of_runs(magnitudes, found, counts, int(wanted.sum())))


def _guess_thresholds(x: Tensor, pieces: Pieces, counts: Tensor) -> Tensor:
    """Return thresholds (S,) that slightly more than ``counts`` elements should reach; 0 if all may be needed."""
    sample, taken, lengths = pieces.sample
    expected = taken * counts / lengths
    ranks = (expected + 3 * expected.sqrt() + 1).ceil().to(torch.int64)
    ranks = torch.where(counts > 0, ranks, 0)
    return kernels.kth_by_run(x.index_select(0, sample).abs(), taken, ranks)


def _counts(candidates: Tensor, spans: Tensor) -> Tensor:
    return torch.searchsorted(candidates, spans.to(torch.int32)).diff(dim=1).view(-1)


def _largest_of_runs(magnitudes: Tensor, found: Tensor, counts: Tensor, total: int) -> Tensor:
    """Return ascending positions (total,) of the ``counts`` largest of each run of ``found``; ties to the lowest."""
    size = magnitudes.numel()
    cuts = kernels.kth_by_run(magnitudes, found, counts).repeat_interleave(found, output_size=size)
    above, tied = magnitudes > cuts, magnitudes == cuts
    owner = torch.arange(found.numel(), device=found.device).repeat_interleave(found, output_size=size)
    room = counts - torch.zeros_like(counts).index_add_(0, owner, above.to(torch.int64))
    seen = tied.cumsum(0)
    starts = found.cumsum(0) - found
    before = torch.cat([seen.new_zeros(1), seen])[starts]
    return places_of(above | (tied & (seen - before[owner] <= room[owner])), total)
