"""MiCRO in messages of fixed size."""

import math

import micro
from tests.sparsifiers.base import Band, Outcome, Row, all_reduce

K = 12  # of the laws' 257 elements at a density of 0.05


def room(outcome: Outcome) -> int:
    """Return the indices in a message: twice a rank's share of k, two roots more, no more than a slice has."""
    share = K / outcome.world_size
    return min(math.ceil(2 * share + 2 * math.sqrt(share)), -(-outcome.numel // outcome.world_size))


def histogram(outcome: Outcome, rank: int) -> float:
    """The wide histogram of the first step."""
    return 0.0 if outcome.step else all_reduce(2040 * 4, outcome.world_size)


def messages(outcome: Outcome, rank: int) -> float:
    """32 counts, the finite flag and the room, to every other rank."""
    return 4 * (33 + room(outcome)) * (outcome.world_size - 1)


def values(outcome: Outcome, rank: int) -> float:
    """All-reduce of k values."""
    return all_reduce(outcome.value_bytes * min(K, room(outcome) * outcome.world_size), outcome.world_size)


ROWS: tuple[Row, ...] = (
    Row(
        name="micro+fixed",
        make=lambda density, seed: micro.FixedMicro(density=density, seed=seed),
        band=Band(1.0, lambda _world_size: 1.0, at_once=False),
        counts=histogram,
        indices=messages,
        values=values,
        num_collectives=2,
    ),
)
