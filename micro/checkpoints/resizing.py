"""Resume with another number of ranks: turn the saved states of n ranks into those of m."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from micro.checkpoints.saved_state import SHARDS

PARTS = frozenset({"selector", "exchange", "density", "factors"})  # their states depend on the number of ranks


def average(states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return the states of ``world_size`` new ranks, from the saved states of all old ranks.

    Each new residual is the mean of the old ones. The model moves by the mean over ranks of what they send, so what
    remains to be sent stays the same with n old and m new ranks: ``sum(old) / n == sum(new) / m``. Thresholds and
    boundaries depend on the old group: selector, exchange, density and factors start from their initial state.

        states = [torch.load(f"rank{rank}.pt") for rank in range(4)]
        attachment.load_state_dict(micro.average(states, 2)[rank])

    Args:
        states: what ``Attachment.state_dict`` returned on every old rank, in any order.
        world_size: of the new group.

    Raises:
        ValueError: a rank's state is missing or given twice, states are of different steps, or of TwoLevel or a sharded
            model.
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
        return  # buckets only, as simulated ranks save them
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
    """Return the mean of one bucket over the ranks."""
    memories = [bucket["memory"] for bucket in saved]
    memory = {
        key: {name: _mean_of([memory[key][name] for memory in memories]) for name in pieces}
        for key, pieces in memories[0].items()
    }
    return without_parts(saved[0]) | {"memory": memory}


def without_parts(bucket: dict[str, Any]) -> dict[str, Any]:
    """Return a bucket, or a share of one, without its parts' states, which then start anew."""
    inner = {"share": without_parts(bucket["share"])} if "share" in bucket else {}
    return {key: value for key, value in bucket.items() if key not in PARTS} | inner


def _mean_of(pieces: Sequence[Tensor]) -> Tensor:
    return torch.stack([piece.cpu() for piece in pieces]).mean(0)
