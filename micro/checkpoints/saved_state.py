"""The format of an attachment's saved state: a header with rank, step and method, and the states of its buckets."""

from collections.abc import Mapping
from typing import Any

from micro import retired
from micro.checkpoints.description import misfit

FORMAT = "micro.attachment"
VERSION = 1
SHARDS = ("shard", "model shard")  # scopes of states that hold a node's shard: these cannot be averaged over ranks


def header(*, rank: int, world_size: int, step: int, scope: str, method: dict[str, Any]) -> dict[str, Any]:
    """Return the header of a saved state.

    Args:
        step: number of finished steps.
        scope: 'model' if the whole model is one vector, otherwise 'bucket'; one of SHARDS if it is sharded.
        method: the reducer with all parts and settings, see micro.checkpoints.description.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "world_size": world_size,
        "step": step,
        "scope": scope,
        "method": method,
    }


def check_header(saved: Any, *, rank: int, world_size: int, scope: str, method: dict[str, Any]) -> None:
    """Raise ValueError unless this rank can load ``saved``."""
    if not isinstance(saved, Mapping) or "buckets" not in saved or saved.get("format") != FORMAT:
        given = f"keys {', '.join(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"state must be what Attachment.state_dict() returned, got {given or 'no keys'}")
    if saved["version"] > VERSION:
        raise ValueError(
            f"state has version {saved['version']}, this micro reads up to {VERSION}: install a newer micro"
        )
    if saved["world_size"] != world_size:
        remedy = (
            f"load micro.average(states, {world_size})[rank] of the states of all {saved['world_size']} ranks, as "
            "micro.RankStates and micro.AllRanks do with resize=True"
        )
        if saved["scope"] in SHARDS:
            remedy = "shards of a node have no mean, start as many nodes and ranks per node"
        raise ValueError(f"state is of world_size {saved['world_size']}, this group has {world_size}: {remedy}")
    if saved["rank"] != rank:
        raise ValueError(
            f"state is of rank {saved['rank']}, this is rank {rank}: save the state of every rank and load each rank's "
            "own (micro.RankStates does it for torch.distributed.checkpoint)"
        )
    found = (f"scope={saved['scope']}", f"scope={scope}") if saved["scope"] != scope else None
    found = misfit(saved["method"], method) or found
    if found is not None:
        gone = retired.refusal_of_state(saved["method"])
        if gone:
            raise ValueError(gone)
        raise ValueError(f"state was saved with {found[0]}, this reducer has {found[1]}: use the method that saved it")
