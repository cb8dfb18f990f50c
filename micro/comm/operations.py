"""The collective operations, by the names under which they are counted, measured and predicted."""

from collections.abc import Sequence
from typing import Literal, get_args

Op = Literal["all_reduce", "gather_rows", "gather_lists", "scatter", "broadcast"]
OPS: tuple[Op, ...] = get_args(Op)
"""All of them. The size of an operation, in bytes, is that of the vector of an all_reduce or broadcast, of one rank's
row or list in a gather, and of all that one rank sends in a scatter."""

Kind = Literal["counts", "indices", "values"]
"""As what bytes are counted."""

PADDING = 1.25  # lists of n ranks travel padded to the longest where that makes no more of them than this


def travels_padded(counts: Sequence[int]) -> bool:
    """Return whether lists of these lengths, one of each rank, are gathered filled up to the longest.

    A rank sends the longest as often as it would send its own, so the rank that has it, for which all wait, sends no
    more than without padding. Two ranks save nothing by it.
    """
    total = sum(counts)
    return len(counts) > 2 and total > 0 and len(counts) * max(counts) <= PADDING * total


def bytes_sent(op: Op, size: float, world_size: int) -> float:
    """Return the bytes that a rank sends in a collective by its bandwidth-optimal form, as a mean over the ranks.

    Args:
        size: of the operation; see OPS.
    """
    if op == "all_reduce":
        return 2 * size * (world_size - 1) / world_size
    if op == "broadcast":
        return size * (world_size - 1) / world_size
    return size if op == "scatter" else (world_size - 1) * size
