"""What a method is expected to send in a step in steady state: each part says it beside the code that sends.

A reducer is given a `Bucket` and returns a `Volume`. In a sparse method the selector says what choosing takes
(`Choosing`), and the exchange what follows from the choice (micro.exchanges.predicted_traffic). Periodic work is not
counted: controllers have settled, MiCRO does not search for a lost threshold, Ok-Topk does not move its regions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from micro.comm.ranks import Op, bytes_sent
from micro.values.flat import Layout

Call = tuple[Op, float]
"""A collective and its size, as a mean over the ranks that call it (micro.comm.ranks.OPS)."""

Calls = tuple[Call, ...]

COUNT_BYTES = 4  # a length or a flag travels as int32
_DTYPES = {2: torch.float32, 4: torch.float32, 8: torch.float64}  # of the accumulator


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A vector that ``world_size`` ranks reduce together, and what is known of a step of it.

    Attributes:
        build_up: distinct indices in the update over the target count, both of what is not reduced densely. None: where
            ranks choose by themselves, as if they chose at random, numel (1 - (1 - local_count / numel)^n); 1
            otherwise, and where an exchange keeps k.
        local_count: elements that one rank chooses. None: k, or its share of build_up * k where ranks divide the
            vector among them. With two levels, of its shard, as a mean over the shards.
        longest_count: elements that the rank chooses which chooses most, of one level: to it lists may be padded. None:
            as many as one rank, and where ranks divide the vector what chance adds.
        layout: names and shapes of the parameters, where the method looks at them; one vector by default.
        element_bytes: of one number of the gradient. What travels is accumulated in four bytes at least.

    Raises:
        ValueError: no elements or ranks, a layout of another length, or a width that no gradient has.
    """

    numel: int
    world_size: int
    build_up: float | None = None
    local_count: float | None = None
    longest_count: float | None = None
    layout: Layout | None = None
    element_bytes: int = 4

    def __post_init__(self) -> None:
        if self.numel < 1 or self.world_size < 1:
            raise ValueError(f"numel and world_size must be at least 1, got {self.numel} and {self.world_size}")
        if self.layout is not None and self.layout.numel != self.numel:
            raise ValueError(f"layout has {self.layout.numel} elements, the bucket {self.numel}")
        if self.element_bytes not in _DTYPES:
            raise ValueError(f"element_bytes must be one of {', '.join(map(str, _DTYPES))}, got {self.element_bytes}")

    @property
    def dtype(self) -> torch.dtype:
        """Of the accumulator."""
        return _DTYPES[self.element_bytes]

    @property
    def named(self) -> Layout:
        """The layout, or that of one vector."""
        return self.layout or Layout.flat(self.numel)

    def volume(self, calls: Calls, num_updated: float) -> "Volume":
        """Return the volume of these collectives of all ranks; one rank calls none."""
        return Volume(world_size=self.world_size, calls=calls if self.world_size > 1 else (), num_updated=num_updated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """What a selector says of a step.

    Attributes:
        calls: the collectives that choosing takes.
        count: elements that one rank chooses where ranks choose by themselves; None: k.
        knows_counts: whether all ranks know then how many each has chosen.
        searches: the part of the vector that a rank searches: all of it, or a slice of its own, which is one range.
    """

    calls: Calls = ()
    count: float | None = None
    knows_counts: bool = False
    searches: Literal["all", "range"] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The collectives of one bucket, in turn.

    Attributes:
        world_size: number of all ranks.
        ranks_per_node: of two levels; 1 where ranks are of one level.
        calls: of all ranks together.
        local_calls: of the ranks of a node.
        place_calls: for each place in a node, those of the ranks of this place in all nodes; the places call them side
            by side, and one whose shard is empty calls none. () where ranks are of one level.
        num_updated: elements of the update that are not zero.
    """

    world_size: int
    ranks_per_node: int = 1
    calls: Calls = ()
    local_calls: Calls = ()
    place_calls: tuple[Calls, ...] = ()
    num_updated: float

    @property
    def num_nodes(self) -> int:
        """Number of nodes; of ranks, where these are of one level."""
        return self.world_size // self.ranks_per_node

    @property
    def local_bytes(self) -> float:
        """Bytes that a rank sends within its node, as a mean over the ranks; see StepStats."""
        return _sent_by_rank(self.local_calls, self.ranks_per_node)

    @property
    def between_bytes(self) -> float:
        """Bytes that a rank sends otherwise, as a mean over the ranks: to other nodes, where there are two levels."""
        places = sum(_sent_by_rank(calls, self.num_nodes) for calls in self.place_calls) / self.ranks_per_node
        return _sent_by_rank(self.calls, self.world_size) + places

    @property
    def num_local_calls(self) -> int:
        """Collectives that a rank calls within its node."""
        return len(self.local_calls)

    @property
    def num_calls(self) -> float:
        """Collectives that a rank calls otherwise, as a mean over the ranks."""
        return len(self.calls) + sum(map(len, self.place_calls)) / self.ranks_per_node


def _sent_by_rank(calls: Sequence[Call], world_size: int) -> float:
    """Return the bytes that a rank sends in these collectives of ``world_size`` ranks, as a mean over the ranks."""
    return sum(bytes_sent(op, size, world_size) for op, size in calls)


class Predicted(Protocol):
    """A reducer: it says what it sends for a bucket."""

    @property
    def full_name(self) -> str:
        """Its name, and that of the part inside."""

    def volume(self, bucket: Bucket) -> Volume:
        """Return the collectives that it calls."""


def volume_of(reducer: Predicted, numel: int, world_size: int, **facts: Any) -> Volume:
    """Return the collectives that ``reducer`` calls for a bucket of ``numel`` elements, each with its size, in turn.

    The step is one in steady state. Sizes are means over ranks; in the rounds of gTop-k's tree, where most ranks send
    nothing, they are of a rank that sends. Of a density that changes with time the final one counts, the lower one
    where it alternates.

    Args:
        facts: what else is known of the bucket, by the names of `Bucket`.

    Raises:
        ValueError: no elements or ranks, a layout of another length or none where shapes decide, ranks that do not fill
            nodes, or a part that does not say what it sends.
    """
    return reducer.volume(Bucket(numel=numel, world_size=world_size, **facts))


def calls_of(reducer: Predicted, numel: int, world_size: int, **facts: Any) -> Calls:
    """Return the collectives of ``volume_of`` for a reducer of one level. Raises: ValueError: it has two."""
    volume = volume_of(reducer, numel, world_size, **facts)
    if volume.place_calls:
        raise ValueError(f"{reducer.full_name} calls collectives of two levels: ask for its volume_of")
    return volume.calls
