"""A patch from one rank of a process group to all: applied on every rank or on none."""

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
    """Send a patch from one rank to all of a group, which all call this; apply it on all of them or on none.

    Args:
        weights: of this rank, the base of the patch; None on a rank that has none to bring up to date.
        patch: on rank ``source`` alone.
        group: the process group; None is the default one.
        source: a rank of this group, whose patch all ranks return.

    Raises:
        ValueError: on all ranks: one of them gives arguments that do not fit, or weights that `apply_` refuses.
        PeerError: a rank did not come until the time-out of the group; nothing has changed where this is raised.
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
