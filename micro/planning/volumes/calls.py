"""Collectives with their sizes, by the group of ranks that calls them."""

from collections.abc import Sequence
from dataclasses import dataclass

from micro.operations import Op, bytes_sent

Call = tuple[Op, float]
Calls = tuple[Call, ...]

COUNT_BYTES = 4  # a length or a flag travels as int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The collectives of one bucket, each with its size as a mean over the ranks that call it, in turn.

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
        return sent_by_rank(self.local_calls, self.ranks_per_node)

    @property
    def between_bytes(self) -> float:
        """Bytes that a rank sends otherwise, as a mean over the ranks: to other nodes, where there are two levels."""
        places = sum(sent_by_rank(calls, self.num_nodes) for calls in self.place_calls) / self.ranks_per_node
        return sent_by_rank(self.calls, self.world_size) + places

    @property
    def num_local_calls(self) -> int:
        """Collectives that a rank calls within its node."""
        return len(self.local_calls)

    @property
    def num_calls(self) -> float:
        """Collectives that a rank calls otherwise, as a mean over the ranks."""
        return len(self.calls) + sum(map(len, self.place_calls)) / self.ranks_per_node


def sent_by_rank(calls: Sequence[Call], world_size: int) -> float:
    """Return the bytes that a rank sends in these collectives of ``world_size`` ranks, as a mean over the ranks."""
    return sum(bytes_sent(op, size, world_size) for op, size in calls)
