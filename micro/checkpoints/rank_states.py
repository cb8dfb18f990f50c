"""Put every rank's state into one checkpoint, with torch.distributed.checkpoint or in a file that rank 0 writes."""

import io
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from micro.checkpoints.resizing import average
from micro.comm.objects import gather_objects, gather_objects_at_first

NUM_KEYS = 64  # least number of keys in a checkpoint: up to so many ranks can load what fewer saved
_SAVED = "call it on all ranks, and only write the file under `if rank == 0:`"
_LOADED = "load on all ranks"


class HasRankState(Protocol):
    """An attachment, which has a state on each rank."""

    @property
    def rank(self) -> int:
        """The rank of this state."""

    @property
    def world_size(self) -> int:
        """Number of ranks with a state."""

    @property
    def group(self) -> Any:
        """The process group of these ranks; None is the default one."""

    def meet(self, call: str, *, remedy: str) -> AbstractContextManager[Any]:
        """Return a context that all ranks enter together, see micro.drivers.meeting."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""

    def check_state(self, saved: Any) -> None:
        """Raise ValueError if a state does not fit."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""


class RankStates:
    """Wrap an attachment for torch.distributed.checkpoint: one key per rank, so that every rank's state is saved.

        dcp.save({"model": ..., "micro": micro.RankStates(attachment)}, checkpoint_id=folder)
        dcp.load({"model": ..., "micro": micro.RankStates(attachment)}, checkpoint_id=folder)

    An attachment alone has the same keys on all ranks, and torch.distributed.checkpoint saves equal keys only once.

    On loading, it requests the keys before it knows how many ranks saved, and fails if one is missing. So there are at
    least NUM_KEYS keys; the key of a rank that did not exist holds the number of ranks.

    Args:
        resize: average the states of another number of ranks (micro.average) instead of refusing them. Each rank then
            holds the states of all ranks in memory while loading.
    """

    def __init__(self, attachment: HasRankState, *, resize: bool = False) -> None:
        self._attachment = attachment
        self._resize = resize
        self._key = f"rank{attachment.rank}"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as bytes under its own key, since buckets may differ on loading."""
        stored = io.BytesIO()
        torch.save(self._attachment.state_dict(), stored)
        rank, world_size = self._attachment.rank, self._attachment.world_size
        absent = {f"rank{other}": world_size for other in range(rank + world_size, NUM_KEYS, world_size)}
        return {self._key: stored.getvalue(), **absent}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned on the same rank. Call it on all ranks: all load it, or all refuse it.

        Raises:
            ValueError: on all ranks: a rank's state is missing or does not fit; see Attachment.load_state_dict.
        """
        with self._attachment.meet("micro.RankStates.load_state_dict", remedy=_LOADED) as entry:
            if self._key not in saved:
                raise ValueError(f"state must have the key '{self._key}', got {', '.join(saved) or 'none'}")
            own = _decoded(saved[self._key])
            number = own.get("world_size") if isinstance(own, dict) else own
            resizes = self._resize and number != self._attachment.world_size
            if resizes:
                entry.settings["resize from"] = number
            elif isinstance(own, dict):  # a rank beyond those that saved has none; the others' refusal reaches it
                self._attachment.check_state(own)
        self._attachment.load_state_dict(self._averaged(saved) if resizes else own)

    def _averaged(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's averaged state; each rank has read some states of another number of ranks."""
        read = [each for each in map(_decoded, saved.values()) if isinstance(each, dict)]
        found: Any = gather_objects(read, self._attachment.group)
        states = [state for of_rank in found for state in of_rank]
        return average(states, self._attachment.world_size)[self._attachment.rank]


class AllRanks:
    """Wrap an attachment for checkpoints that only rank 0 writes: the state holds those of all ranks.

        accelerator.register_for_checkpointing(micro.AllRanks(attachment))  # Accelerate
        fabric.save(path, {"model": model, "micro": micro.AllRanks(attachment)})  # Fabric

    Call ``state_dict`` on all ranks, as these frameworks do. Rank 0 then holds the states of all ranks in memory, and
    every rank reads that file; for large models, prefer one file per rank, or RankStates.

    Args:
        everywhere: every rank, not only rank 0, gets the states of all ranks; for frameworks that write a file per
            node.
        resize: average the states of another number of ranks (micro.average) instead of refusing them.
    """

    def __init__(self, attachment: HasRankState, *, everywhere: bool = False, resize: bool = False) -> None:
        self._attachment = attachment
        self._everywhere = everywhere
        self._resize = resize

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, or {} on a rank that gets none; call it on all ranks.

        If a rank is late, a warning names it after some seconds.

        Raises:
            PeerError: on all ranks: a rank did not call it before the group's timeout, or began a step instead.
        """
        with self._attachment.meet("micro.AllRanks.state_dict", remedy=_SAVED):
            own = self._attachment.state_dict()
        gather = gather_objects if self._everywhere else gather_objects_at_first
        states = gather(own, self._attachment.group)
        return {} if states is None else {"ranks": states}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load this rank's state from what ``state_dict`` returned.

        Raises:
            ValueError: a rank's state is missing or does not fit; see Attachment.load_state_dict.
        """
        if "ranks" not in saved:
            given = f"the keys {', '.join(map(str, saved))}" if saved else "nothing"
            raise ValueError(
                f"state must be what micro.AllRanks gave to rank 0, got {given}: save with AllRanks(attachment), with "
                "everywhere=True where each node writes its own file"
            )
        rank, world_size, states = self._attachment.rank, self._attachment.world_size, saved["ranks"]
        if len(states) != world_size and not self._resize:
            raise ValueError(
                f"state is of {len(states)} ranks, this group has {world_size}: start as many, or average it with "
                "micro.AllRanks(attachment, resize=True)"
            )
        own = states if len(states) == world_size else average(states, world_size)
        self._attachment.load_state_dict(own[rank])


def _decoded(stored: Any) -> Any:
    """Return a rank's state; for a rank that did not exist, the number of ranks."""
    return state_of(stored) if isinstance(stored, bytes) else stored


def state_of(stored: bytes) -> dict[str, Any]:
    """Return the state that RankStates stored under a rank's key, for instance for micro.average."""
    state: dict[str, Any] = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    return state
