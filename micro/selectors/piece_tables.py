"""Select the largest magnitudes of many short pieces on an accelerator, without waiting for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from micro.kernels.reference import places_of
from micro.values.finite import to_device

MOST = 1 << 24  # elements of a table: temporaries take some 40 bytes per element


@dataclass(frozen=True, slots=True)
class Table:
    """Pieces whose lengths differ by at most a factor of 2, as rows.

    Attributes:
        rows: (R,) int64 numbers of the pieces, on the CPU.
        spans: (R, 2) int32 their starts and stops, on the device.
        longest: number of elements of the longest.
    """

    rows: Tensor
    spans: Tensor
    longest: int


def tables_of(spans: Tensor, device: torch.device) -> tuple[Table, ...]:
    """Return tables of all non-empty pieces (S, 2), each of at most MOST elements unless one piece is longer."""
    lengths = spans.diff(dim=1).view(-1)
    classes = lengths.double().log2().ceil()  # of 1, 2, 3 to 4, 5 to 8 elements and so on; of none: -inf
    tables = []
    for number in classes[lengths > 0].unique().tolist():
        alike = torch.nonzero(classes == number).view(-1)
        longest = int(lengths[alike].max())
        blocks = alike.split(max(MOST // longest, 1))
        tables += [Table(rows, to_device(spans[rows].to(torch.int32), device), longest) for rows in blocks]
    return tuple(tables)


def largest_in_tables(x: Tensor, tables: Sequence[Table], counts: Tensor) -> Tensor:
    """Return the ascending int32 indices of the ``counts`` (S,) largest magnitudes of each piece; ties to the lowest.

    Exact; the host does not wait for the device.

    Args:
        x: (numel,) without NaN.
        counts: int64 on the CPU, at most the lengths of the pieces.
    """
    found = [_largest(x, table, wanted) for table in tables if (wanted := counts[table.rows]).any()]
    if not found:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    return found[0] if len(found) == 1 else torch.cat(found).sort().values


def _largest(x: Tensor, table: Table, wanted: Tensor) -> Tensor:
    """Return the indices of one table's pieces, in the order of its rows."""
    counts = to_device(wanted.to(torch.int32), x.device)[:, None]
    starts, stops = table.spans.split(1, dim=1)
    offsets, lengths = torch.arange(table.longest, dtype=torch.int32, device=x.device), stops - starts
    places = starts + offsets.minimum(lengths - 1)  # below the vector's length, which int32 may just hold
    magnitudes = x.index_select(0, places.view(-1)).abs().view(places.shape).masked_fill_(offsets >= lengths, -1.0)
    falling = torch.topk(magnitudes, int(wanted.max()), dim=1).values
    cuts = falling.gather(1, (counts - 1).clamp_(min=0).long()).masked_fill_(counts == 0, torch.inf)
    above, tied = magnitudes > cuts, magnitudes == cuts
    room = counts - above.sum(1, keepdim=True)
    keep = above | (tied & (tied.cumsum(1, dtype=torch.int32) <= room))
    indices: Tensor = places.view(-1).index_select(0, places_of(keep.view(-1), int(wanted.sum())))
    return indices
