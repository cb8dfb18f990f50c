"""What a row of the table is, and the closed forms that rows share.

Closed forms count what the exchanges promise, independently: nothing here calls the code that counts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import micro
from micro.comm import Kind
from micro.testing import BUILD_UP, EXACT, Band, Promises

__all__ = ["BUILD_UP", "EXACT", "Band", "Outcome", "Row"]

Make = Callable[[micro.Density[Any] | float, int], micro.Reducer]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step: all that its bytes may depend on.

    Attributes:
        world_size: n.
        counts: how many indices each rank chose.
        num_updated: K, the number of distinct indices in the update.
        value_bytes: of one value as it is accumulated.
        num_extra: collectives beyond those of a step in steady state.
        numel: d.
        step: its number.
        acc: (world_size, numel) what the ranks chose from.
        update: (numel,) the mean update.
        last_counts: the counts of the step before; () at the first.
        overfull: whether the message that has room for what is chosen had too little.
    """

    world_size: int
    counts: tuple[int, ...]
    num_updated: int
    value_bytes: int
    num_extra: int = 0
    numel: int = 0
    step: int = 0
    acc: Tensor | None = None
    update: Tensor | None = None
    last_counts: tuple[int, ...] = ()
    overfull: bool = False


Bytes = Callable[[Outcome, int], float]  # what one rank sends


STEERED = Band(0.5, lambda _world_size: 2.0, at_once=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method and what it promises.

    Attributes:
        name: of the row.
        make: density or schedule, seed -> reducer.
        band: where the density ends up; None where it is not controlled.
        counts, indices, values: closed forms of the bytes that one rank sends.
        num_collectives: of a step in steady state, with three or four ranks: the fewest.
        conserves_mass: what is not sent is kept.
        follows_density: the target is the given density (dense ignores it, Accordion derives its own).
        by_tensor: k is that of each tensor, in sum.
        names_rank: an error about NaN names the rank.
        seeded: another seed gives other indices.
        rule: the rule that the statistics must name.
        updates_all: whatever counts as updated is not zero (codes of few bits round to zero).
        mixes: an element of the update is made of many, so that rounding is relative to the norm of the vector.
        spectral: what is chosen are bins of the spectrum: counts are of those, and the update is dense.
        own_thresholds: each rank has its own threshold, which the others do not know.
        dense: parameters of which nothing is kept, because they are reduced densely.
        ranks_per_node: gradients are averaged over so many ranks first, so that mass is conserved over nodes.
        upper_bounds: bytes depend on more than the outcome; counts, indices and values bound them from above.
        states_traffic: what the parts state holds for a whole bucket, of one level and in one piece.
    """

    name: str
    make: Make
    band: Band | None
    counts: Bytes
    indices: Bytes
    values: Bytes
    num_collectives: int
    conserves_mass: bool = True
    follows_density: bool = True
    by_tensor: bool = False
    names_rank: bool = True
    seeded: bool = False
    rule: str | None = None
    updates_all: bool = True
    mixes: bool = False
    spectral: bool = False
    own_thresholds: bool = False
    dense: tuple[str, ...] = ()
    ranks_per_node: int = 1
    upper_bounds: bool = False
    states_traffic: bool = True

    def world_size(self, at_least: int) -> int:
        """Return the smallest number of ranks from ``at_least`` on that the method takes: whole nodes."""
        return -(-at_least // self.ranks_per_node) * self.ranks_per_node

    @property
    def promises(self) -> Promises:
        """What `micro.testing` checks."""
        return Promises(
            band=self.band,
            conserves_mass=self.conserves_mass,
            states_traffic=self.states_traffic,
            names_rank=self.names_rank,
            mixes=self.mixes,
            dense=self.dense,
            ranks_per_node=self.ranks_per_node,
        )

    def bytes_sent(self, outcome: Outcome, rank: int) -> dict[Kind, float]:
        """Return the bytes that ``rank`` has to have sent, by kind."""
        return {
            "counts": self.counts(outcome, rank),
            "indices": self.indices(outcome, rank),
            "values": self.values(outcome, rank),
        }


def no_bytes(outcome: Outcome, rank: int) -> float:
    """No such message."""
    return 0.0


def rows(row_bytes: int) -> Bytes:
    """All-gather of a row of ``row_bytes`` per rank."""
    return lambda outcome, _rank: row_bytes * (outcome.world_size - 1)


def gathered(sizes: Sequence[float], rank: int) -> float:
    """A list of each rank to all others, filled up to the longest where that makes no more than 1.25 times as much."""
    n, longest = len(sizes), max(sizes)
    size = longest if n > 2 and n * longest <= 1.25 * sum(sizes) else sizes[rank]
    return (n - 1) * size


def lists(element_bytes: int) -> Bytes:
    """A list of each rank to all others."""
    return lambda outcome, rank: gathered([element_bytes * count for count in outcome.counts], rank)


def raw_lists(outcome: Outcome, rank: int) -> float:
    """Each rank's own values at full length, to every other rank."""
    return lists(outcome.value_bytes)(outcome, rank)


def broadcast(outcome: Outcome, rank: int) -> float:
    """One list of int32 from one rank to all, as a mean over the ranks."""
    return 4 * sum(outcome.counts) * (outcome.world_size - 1) / outcome.world_size


def all_reduce(num_bytes: float, world_size: int) -> float:
    """Ring all-reduce."""
    return 2 * num_bytes * (world_size - 1) / world_size


def dense_values(outcome: Outcome, rank: int) -> float:
    """All-reduce of everything."""
    return all_reduce(outcome.value_bytes * outcome.num_updated, outcome.world_size)


def union_values(outcome: Outcome, rank: int) -> float:
    """All-reduce of the union's values and the finite flag."""
    return all_reduce(outcome.value_bytes * (outcome.num_updated + 1), outcome.world_size)


def encoded_values(num_bytes: Callable[[int], int]) -> Bytes:
    """Encoded values of the union: each part and a byte to its owner, the mean of the own part to all."""

    def sent(outcome: Outcome, rank: int) -> float:
        n = outcome.world_size
        sizes = [num_bytes(outcome.num_updated // n + (part < outcome.num_updated % n)) for part in range(n)]
        return sum(sizes) - sizes[rank] + (n - 1) + gathered(sizes, rank)

    return sent


def agreed_counts(outcome: Outcome, rank: int) -> float:
    """32 counts to every other rank; where the cut was lost, a wide histogram, and the counts once more."""
    n = outcome.world_size
    histogram = all_reduce(2040 * 4, n) if outcome.num_extra else 0.0
    return 128 * (n - 1) * max(1, outcome.num_extra) + histogram


def slack_searches(outcome: Outcome) -> int:
    """Collectives beyond those of a settled step that are due to a lost cut, where indices travel with counts."""
    return outcome.num_extra - (outcome.overfull or not outcome.last_counts)


def slack_counts(outcome: Outcome, rank: int) -> float:
    """A histogram where the cut was lost; the counts of the first step, which knows nothing."""
    n, searches = outcome.world_size, slack_searches(outcome)
    alone = 0 if outcome.last_counts else 128 * (n - 1) * max(1, searches)
    return alone + (all_reduce(2040 * 4, n) if searches else 0.0)


def slack_indices(outcome: Outcome, rank: int) -> float:
    """32 counts with room for candidates in one message; exact lists in the first step and where there was too little.

    The room is that of the slice that gave most, a fifth and half the root more, but no more than a slice has. A
    candidate takes the bytes that a place in a slice needs; messages are of whole int32.
    """
    n = outcome.world_size
    exact = lists(4)(outcome, rank)
    if not outcome.last_counts or n == 1:
        return exact
    most = max(outcome.last_counts) * sum(outcome.counts) / sum(outcome.last_counts)
    longest = -(-outcome.numel // n)
    capacity = min(math.ceil(1.2 * most + 0.5 * math.sqrt(most)), longest)
    width = 1 if longest <= 256 else 2 if longest <= 1 << 16 else 3
    messages = (128 + -(-capacity * width // 4) * 4) * max(1, slack_searches(outcome)) * (n - 1)
    return messages + (exact if outcome.overfull else 0.0)


def steered_counts(outcome: Outcome, rank: int) -> float:
    """A count and a sum of logarithms to every other rank; where the threshold is searched, two histograms."""
    n = outcome.world_size
    return 16 * (n - 1) + (all_reduce((2040 + 2048) * 4, n) if outcome.num_extra else 0.0)


def and_header(counts: Bytes) -> Bytes:
    """Add the header of the gather exchange: the count and the finite flag."""
    return lambda outcome, rank: counts(outcome, rank) + rows(8)(outcome, rank)


def sparse(selector: micro.Selector, **parts: object) -> Make:
    """Return a maker of the sparse reducer that is composed of these parts."""
    return lambda density, seed: micro.SparseReducer(selector, density, seed=seed, **parts)  # type: ignore[arg-type]
