"""Resume with another number of workers: from the saved states of n ranks to those of m."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from micro.checkpoints.saved_state import SHARDS

PARTS = frozenset({"selector", "exchange", "density", "factors"})  # whose states belong to the old group


def average(states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return the states with which the ranks of a new group start, one per rank, from those that all old ranks saved.

    What is kept for each parameter, the residual above all, becomes its mean over the old ranks. The model moves by the
    mean over the workers of what they send, so with n old and m new ranks what is still to be sent stays the same:
    ``sum(old) / n == sum(new) / m``. Thresholds and boundaries belong to the old group: selector, exchange, density
    and factors start from their initial state.

        states = [torch.load(f"rank{rank}.pt") for rank in range(4)]
        attachment.load_state_dict(micro.average(states, 2)[rank])

    Args:
        states: what ``Attachment.state_dict`` returned on each rank, all of them, in any order.
        world_size: of the new group.

    Raises:
        ValueError: states of a rank are missing or given twice, were saved at different steps, or are of TwoLevel or of
            a sharded model.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    _check(states)
    buckets = [_mean(saved) for saved in zip(*(state["buckets"] for state in states), strict=True)]
    first = {key: value for key, value in states[0].items() if key != "buckets"}
    if "version" not in first:
        return [{"buckets": buckets} for _ in range(world_size)]
    return [{**first, "rank": rank, "world_size": world_size, "buckets": buckets} for rank in range(world_size)]


def _check(states: Sequence[dict[str, Any]]) -> None:
    if not states:
        raise ValueError("states must hold one state per rank, got none")
    if any(_is_of_shards(state) for state in states):
        raise ValueError(
            "states hold each rank's own shard of a node (two_level, attach_fsdp), and shards have no mean: "
            "go on with the same number of ranks"
        )
    if any(each["is_apart"] or each["under_way"] for state in states for each in state.get("fragments", ())):
        raise ValueError(
            "states were saved in the middle of a round, where each rank has its own weights: save them after finish()"
        )
    if any("version" not in state for state in states):
        return  # of buckets alone, as simulated ranks keep them
    ranks = sorted(state["rank"] for state in states)
    expected = states[0]["world_size"]
    if ranks != list(range(expected)):
        raise ValueError(f"states must be those of ranks 0 to {expected - 1}, one each, got those of {ranks}")
    steps = sorted({state["step"] for state in states})
    if len(steps) > 1:
        raise ValueError(f"states must be of one step, got those of steps {steps}: take one checkpoint")


def _is_of_shards(state: dict[str, Any]) -> bool:
    return state.get("scope") in SHARDS or any("place" in (b | b.get("share", {})) for b in state["buckets"])


def _mean(saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one bucket from those of all ranks."""
    memories = [bucket["memory"] for bucket in saved]
    memory = {
        key: {name: _mean_of([memory[key][name] for memory in memories]) for name in pieces}
        for key, pieces in memories[0].items()
    }
    return without_parts(saved[0]) | {"memory": memory}


def without_parts(bucket: dict[str, Any]) -> dict[str, Any]:
    """Return a bucket, or the share of one, without the states of its parts, which then start from nothing."""
    inner = {"share": without_parts(bucket["share"])} if "share" in bucket else {}
    return {key: value for key, value in bucket.items() if key not in PARTS} | inner


def _mean_of(pieces: Sequence[Tensor]) -> Tensor:
    return torch.stack([piece.cpu() for piece in pieces]).mean(0)
