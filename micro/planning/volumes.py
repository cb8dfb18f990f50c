"""The collectives that a method calls for one bucket and their sizes, from which its cost on any network follows.

Each part says what it sends beside the code that does (``volume``); here this is asked of a whole reducer.
"""

from typing import Any

from micro.flat import Layout
from micro.reducers.base import Reducer
from micro.traffic import Bucket, Call, Calls, Volume

__all__ = ["Call", "Calls", "Volume", "calls_of", "volume_of"]


def volume_of(
    reducer: Reducer,
    numel: int,
    world_size: int,
    *,
    build_up: float | None = None,
    local_count: float | None = None,
    longest_count: float | None = None,
    layout: Layout | None = None,
    element_bytes: int = 4,
) -> Volume:
    """Return the collectives that ``reducer`` calls for a bucket of ``numel`` elements, each with its size, in turn.

    The step is one in steady state: controllers have settled, and nothing that happens once in a while is due (MiCRO's
    search for a lost threshold, Ok-Topk's repartition and spreading, re-evaluations). Sizes are counted as
    micro.planning.tables.LinkTable counts them, as the mean over ranks; in the rounds of gTop-k's tree, where most
    ranks send nothing, they are of a rank that sends. Counts and regions are assumed equal on all ranks. Of a density
    that changes with time the final one counts, the lower one where it alternates.

    Args:
        build_up: distinct indices in the update over the target count, both of what is not reduced densely. None: where
            ranks choose by themselves, as if they chose at random, numel (1 - (1 - local_count / numel)^n); 1
            otherwise, and where an exchange keeps k.
        local_count: elements that one rank chooses. None: k, or its share of build_up * k where ranks divide the
            vector among them. With two levels, of its shard, as a mean over the shards.
        longest_count: elements that the rank chooses which chooses most, of one level: to it lists may be padded. None:
            as many as one rank, and where ranks divide the vector what chance adds.
        layout: names and shapes of the bucket's parameters, where the method looks at them; one vector by default.
        element_bytes: of one number of the gradient. What travels is accumulated in four bytes at least.

    Raises:
        ValueError: no elements or ranks, a layout of another length or none where shapes decide, ranks that do not fill
            nodes, or a part that does not say what it sends.
    """
    bucket = Bucket(
        numel=numel,
        world_size=world_size,
        build_up=build_up,
        local_count=local_count,
        longest_count=longest_count,
        layout=layout,
        element_bytes=element_bytes,
    )
    return reducer.volume(bucket)


def calls_of(reducer: Reducer, numel: int, world_size: int, **facts: Any) -> Calls:
    """Return the collectives of ``volume_of`` for a reducer of one level.

    Raises:
        ValueError: as there, or the reducer is of two levels.
    """
    volume = volume_of(reducer, numel, world_size, **facts)
    if volume.place_calls:
        raise ValueError(f"{reducer.full_name} calls collectives of two levels: ask for its volume_of")
    return volume.calls
