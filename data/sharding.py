"""Which samples belong to a rank: a contiguous shard of a test set, or its part of every step of an epoch."""

from torch import Tensor


def check_ranks(rank: int, world_size: int) -> None:
    """Refuse a rank that is not among the ranks. Raises: ValueError."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")


def shard_of(num: int, rank: int, world_size: int) -> slice:
    """Return a rank's shard of ``num`` samples; shards are disjoint, hold all, and differ in size by one at most."""
    return slice(num * rank // world_size, num * (rank + 1) // world_size)


def samples_of_rank(order: Tensor, size: int, rank: int, world_size: int) -> Tensor:
    """Return the samples of a rank in every step of an epoch: (num_steps, size), a view.

    Args:
        order: (num,) samples in the order of an epoch; the tail that fills no step of all ranks is left out.
        size: samples per rank and step.
    """
    num_steps = len(order) // (world_size * size)
    return order[: num_steps * world_size * size].view(num_steps, world_size, size)[:, rank]
