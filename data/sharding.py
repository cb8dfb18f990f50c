"""Which samples belong to a rank: a contiguous shard of a test set, or its part of every step of an epoch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.seeding import generator


def check_ranks(rank: int, world_size: int) -> None:
    """Refuse a rank that is not among the ranks. Raises: ValueError."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")


def shard_of(num: int, rank: int, world_size: int) -> slice:
    """Return a rank's shard of ``num`` samples; shards are disjoint, hold all, and differ in size by one at most."""
    return slice(num * rank // world_size, num * (rank + 1) // world_size)


def num_parts(num: int, size: int) -> int:
    """Return how many parts of at most ``size`` make up ``num``."""
    return -(-num // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffledShare:
    """A rank's share of a training set; in every epoch all ranks shuffle it equally, by (seed, epoch).

    The ranks' shares are disjoint and of equal size; the tail that fills no step of all ranks is left out.

    Attributes:
        num: samples of the set.
        size: samples per rank and step.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        seed: the run's seed.
    """

    num: int
    size: int
    rank: int
    world_size: int
    seed: int

    @property
    def num_steps(self) -> int:
        """Steps in an epoch, equal on all ranks."""
        return self.num // (self.world_size * self.size)

    def in_epoch(self, epoch: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return this rank's samples in every step of an epoch: (num_steps, size) on the CPU, a view."""
        order = torch.randperm(self.num, generator=generator(self.seed, epoch), dtype=dtype)
        in_steps = order[: self.num_steps * self.world_size * self.size]
        return in_steps.view(self.num_steps, self.world_size, self.size)[:, self.rank]
