"""Predict what a method sends in a step in steady state; each part declares its messages next to the code that sends.

A reducer maps a `Bucket` to a `Volume`. In a sparse method the selector declares the messages of selection
(`Choosing`), and the exchange those that follow from it (micro.exchanges.predicted_traffic). Periodic work is not
counted: thresholds have settled, and Ok-Topk does not move its regions.
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
_DTYPES = {2: torch.float32, 4: torch.float32, 8: torch.float64}  # of accumulators, by bytes of a gradient's element


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A vector that ``world_size`` ranks reduce together, with optional measurements of a step.

    Attributes:
        build_up: distinct indices in the update divided by the target count, without densely reduced parameters. None:
            if ranks choose independently, that of random choices, numel (1 - (1 - local_count / numel)^n) / k; 1
            otherwise, and for exchanges that keep k.
        local_count: elements that one rank chooses. None: k, or its share of build_up * k if ranks divide the vector.
            With two levels, the mean over shards.
        longest_count: the most elements that any rank chooses, on one level; lists may be padded to it. None:
            local_count, plus a random deviation if ranks divide the vector.
        layout: names and shapes of the parameters, for methods that use them; one vector by default.
        element_bytes: size of one number of the gradient; it is accumulated in four bytes at least.

    Raises:
        ValueError: no elements or ranks, a layout of another length, or an unsupported element size.
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
        """The accumulator's dtype."""
        return _DTYPES[self.element_bytes]

    @property
    def named(self) -> Layout:
        """The layout; by default one vector."""
        return self.layout or Layout.flat(self.numel)

    def volume(self, calls: Calls, num_updated: float) -> "Volume":
        """Return the volume of these collectives among all ranks; a single rank calls none."""
        return Volume(world_size=self.world_size, calls=calls if self.world_size > 1 else (), num_updated=num_updated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """What a selector is expected to send and choose in a step.

    Attributes:
        calls: the collectives of selection.
        count: elements that one rank chooses, if ranks choose independently; None: k.
        knows_counts: whether selection tells all ranks how many elements each chose.
        searches: what a rank searches: 'all' of the vector, or one 'range' of it, its slice.
    """

    calls: Calls = ()
    count: float | None = None
    knows_counts: bool = False
    searches: Literal["all", "range"] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The collectives of one bucket, in order.

    Attributes:
        world_size: number of all ranks.
        ranks_per_node: with two levels; 1 with one level.
        calls: among all ranks.
        local_calls: among the ranks of a node.
        place_calls: for each local rank, those among its counterparts on all nodes, which run concurrently; none for an
            empty shard. () with one level.
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
        """Number of nodes; with one level, of ranks."""
        return self.world_size // self.ranks_per_node

    @property
    def local_bytes(self) -> float:
        """Bytes that a rank sends within its node, as a mean over the ranks; see StepStats."""
        return _sent_by_rank(self.local_calls, self.ranks_per_node)

    @property
    def between_bytes(self) -> float:
        """Bytes that a rank sends to other nodes (with one level, to all ranks), as a mean over the ranks."""
        places = sum(_sent_by_rank(calls, self.num_nodes) for calls in self.place_calls) / self.ranks_per_node
        return _sent_by_rank(self.calls, self.world_size) + places

    @property
    def num_local_calls(self) -> int:
        """Collectives that a rank calls within its node."""
        return len(self.local_calls)

    @property
    def num_calls(self) -> float:
        """Collectives that a rank calls between nodes (with one level, all), as a mean over the ranks."""
        return len(self.calls) + sum(map(len, self.place_calls)) / self.ranks_per_node


def _sent_by_rank(calls: Sequence[Call], world_size: int) -> float:
    """Return the bytes that a rank sends in these collectives of ``world_size`` ranks, as a mean over the ranks."""
    return sum(bytes_sent(op, size, world_size) for op, size in calls)


class Predicted(Protocol):
    """A reducer that predicts what it sends for a bucket."""

    @property
    def full_name(self) -> str:
        """Its name, followed by that of the wrapped part."""

    def volume(self, bucket: Bucket) -> Volume:
        """Return the collectives that it calls."""


def volume_of(reducer: Predicted, numel: int, world_size: int, **facts: Any) -> Volume:
    """Return the collectives, with sizes and in order, that ``reducer`` calls for a bucket of ``numel`` elements.

    They are those of a step in steady state. Sizes are means over ranks; in the rounds of gTop-k's tree, where most
    ranks send nothing, over the ranks that send. A density that changes over time counts with its final value; one that
    alternates, with the lower one.

    Args:
        facts: further fields of `Bucket`.

    Raises:
        ValueError: no elements or ranks; a layout of another length, or none if the method needs shapes; ranks that do
            not fill nodes; a part without a prediction.
    """
    return reducer.volume(Bucket(numel=numel, world_size=world_size, **facts))


def calls_of(reducer: Predicted, numel: int, world_size: int, **facts: Any) -> Calls:
    """Return the collectives of ``volume_of`` for a reducer of one level. Raises ValueError for two levels."""
    volume = volume_of(reducer, numel, world_size, **facts)
    if volume.place_calls:
        raise ValueError(f"{reducer.full_name} calls collectives of two levels: ask for its volume_of")
    return volume.calls
