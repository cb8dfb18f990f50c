"""The collective operations, by the names under which they are counted, measured and predicted."""

from typing import Literal, get_args

Op = Literal["all_reduce", "gather_rows", "gather_lists", "scatter", "broadcast"]
OPS: tuple[Op, ...] = get_args(Op)


def bytes_sent(op: Op, size: float, world_size: int) -> float:
    """Return the bytes that a rank sends in a collective by its bandwidth-optimal form, as a mean over the ranks.

    Args:
        size: of the operation, as micro.planning.tables.LinkTable counts it.
    """
    if op == "all_reduce":
        return 2 * size * (world_size - 1) / world_size
    if op == "broadcast":
        return size * (world_size - 1) / world_size
    return size if op == "scatter" else (world_size - 1) * size
