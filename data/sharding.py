"""Which part of a whole is a rank's: one contiguous share of what is measured, or its place in every step's samples."""

from torch import Tensor


def check_ranks(rank: int, world_size: int) -> None:
    """Refuse a rank that is not among the ranks. Raises: ValueError."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")


def share_of(num: int, rank: int, world_size: int) -> slice:
    """Return a rank's part of ``num`` things; parts are disjoint, hold all, and differ in size by one at most."""
    return slice(num * rank // world_size, num * (rank + 1) // world_size)


def dealt(order: Tensor, size: int, rank: int, world_size: int) -> Tensor:
    """Return what a rank gets of every step: (num_steps, size), a view.

    Args:
        order: (num,) samples in the order of an epoch; the tail that fills no step of all ranks is left out.
        size: samples per rank and step.
    """
    num_steps = len(order) // (world_size * size)
    return order[: num_steps * world_size * size].view(num_steps, world_size, size)[:, rank]
