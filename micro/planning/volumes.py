"""The collectives that a method calls for one bucket and their sizes, from which its cost on any network follows.

Each part says what it sends beside the code that does (``volume``); here this is asked of a whole reducer.
"""

from typing import Any

from micro.reducers.base import Reducer
from micro.traffic import Bucket, Call, Calls, Volume

__all__ = ["Call", "Calls", "Volume", "calls_of", "volume_of"]


def volume_of(reducer: Reducer, numel: int, world_size: int, **facts: Any) -> Volume:
    """Return the collectives that ``reducer`` calls for a bucket of ``numel`` elements, each with its size, in turn.

    The step is one in steady state (see micro.traffic). Sizes are counted as micro.planning.tables.LinkTable counts
    them, as the mean over ranks; in the rounds of gTop-k's tree, where most ranks send nothing, they are of a rank that
    sends. Of a density that changes with time the final one counts, the lower one where it alternates.

    Args:
        facts: what else is known of the bucket, by the names of `micro.traffic.Bucket`.

    Raises:
        ValueError: no elements or ranks, a layout of another length or none where shapes decide, ranks that do not fill
            nodes, or a part that does not say what it sends.
    """
    return reducer.volume(Bucket(numel=numel, world_size=world_size, **facts))


def calls_of(reducer: Reducer, numel: int, world_size: int, **facts: Any) -> Calls:
    """Return the collectives of ``volume_of`` for a reducer of one level. Raises: ValueError: it has two."""
    volume = volume_of(reducer, numel, world_size, **facts)
    if volume.place_calls:
        raise ValueError(f"{reducer.full_name} calls collectives of two levels: ask for its volume_of")
    return volume.calls
