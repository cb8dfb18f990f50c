"""The form of an attachment's checkpoint: who saved it, with which method, and the states of its buckets."""

from collections.abc import Mapping
from typing import Any

from micro.checkpoints.description import misfit
from micro.wrappers import plain_names

FORMAT = "micro.attachment"
VERSION = 1
SHARDS = ("shard", "model shard")  # scopes of a state that holds a shard of a node, which has no mean over ranks


def header(*, rank: int, world_size: int, step: int, scope: str, method: dict[str, Any]) -> dict[str, Any]:
    """Return what a state says of itself.

    Args:
        step: steps done.
        scope: 'model' where the whole model is one vector, else 'bucket'; where it is sharded, one of SHARDS.
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
    """Raise ValueError unless this rank can go on from ``saved``; a state without version is of micro before 0.2."""
    check_format(saved)
    if "version" not in saved:
        return
    if saved["world_size"] != world_size:
        remedy = f"load micro.average(states, {world_size})[rank] of the states of all {saved['world_size']} ranks"
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
        raise ValueError(f"state was saved with {found[0]}, this reducer has {found[1]}: use the method that saved it")


def check_format(saved: Any) -> None:
    """Raise ValueError unless ``saved`` is a state of an attachment that this version can read."""
    if not isinstance(saved, Mapping) or "buckets" not in saved or saved.get("format", FORMAT) != FORMAT:
        given = f"keys {', '.join(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"state must be what Attachment.state_dict() returned, got {given or 'no keys'}")
    version = saved.get("version", VERSION)
    if version > VERSION:
        raise ValueError(f"state has version {version}, this micro reads up to {VERSION}: install a newer micro")


def plain_buckets(buckets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return saved buckets with the names of their parameters as they are without wrappers."""
    plain = plain_names(name for bucket in buckets for name in bucket["shapes"])
    if all(name == full for full, name in plain.items()):
        return buckets
    renamed: list[dict[str, Any]] = _renamed(buckets, plain)
    return renamed


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(each, names) for key, each in value.items()}
    return [_renamed(each, names) for each in value] if isinstance(value, list) else value
