"""Broadcast a patch to all ranks of a process group, which apply it everywhere or nowhere."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from micro.comm.group import GroupComm
from micro.comm.objects import broadcast_bytes
from micro.drivers.meeting import meeting
from micro.patches.changes import applied
from micro.patches.patch import Patch, from_bytes, to_bytes
from micro.patches.weights import checked

CALL = "micro.patches.broadcast_"


def broadcast_(
    weights: Mapping[str, Tensor] | None, patch: Patch | None = None, *, group: Any = None, source: int = 0
) -> Patch:
    """Broadcast a patch within a group and apply it on all ranks, or on none; call it on all ranks.

    Args:
        weights: this rank's weights, which the patch updates; None on a rank without weights.
        patch: only on rank ``source``.
        group: the process group; None is the default one.
        source: the rank of this group whose patch all ranks return.

    Raises:
        ValueError: on all ranks: one has invalid arguments, or weights that `apply_` refuses.
        PeerError: a rank did not call it before the group's timeout; this rank's weights are unchanged.
    """
    with meeting(CALL, lambda: GroupComm(group)) as entry:
        comm = GroupComm(group)
        if not 0 <= source < comm.world_size:
            raise ValueError(f"source must be a rank of the group, in [0, {comm.world_size}), got {source}")
        if (comm.rank == source) != isinstance(patch, Patch):
            raise ValueError(f"patch must be given on rank {source} alone, rank {comm.rank} has {type(patch).__name__}")
        own = None if weights is None else checked(weights, "weights")
        entry.settings["source"] = source
    content = broadcast_bytes(b"" if patch is None else to_bytes(patch), source, group)
    undo: Callable[[], None] | None = None
    try:
        with meeting(CALL, lambda: comm):
            received = from_bytes(content, "the message")
            undo = None if own is None else applied(own, received)
    except BaseException:
        if undo is not None:
            undo()
        raise
    return received
