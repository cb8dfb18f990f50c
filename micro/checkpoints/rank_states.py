"""Every rank's state in one checkpoint: of torch.distributed.checkpoint, or of one that rank 0 writes for all."""

import io
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from micro.checkpoints.resizing import average
from micro.comm.objects import gather_objects, gather_objects_at_first

NUM_KEYS = 64  # of a checkpoint, at least: as many ranks may load what fewer have saved
_SAVED = "call it on all ranks, and put no more than the writing of the file under `if rank == 0:`"
_LOADED = "load on all ranks"


class HasRankState(Protocol):
    """What has a state on each rank: an attachment."""

    @property
    def rank(self) -> int:
        """Whose state it is."""

    @property
    def world_size(self) -> int:
        """How many ranks have one."""

    @property
    def group(self) -> Any:
        """The process group of these ranks; None is the default one."""

    def meet(self, call: str, *, remedy: str) -> AbstractContextManager[Any]:
        """Return a context of all ranks, see micro.drivers.meeting."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""

    def check_state(self, saved: Any) -> None:
        """Raise ValueError where a state does not fit."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""


class RankStates:
    """An attachment as torch.distributed.checkpoint takes it: one key per rank, so that every rank's state is kept.

        dcp.save({"model": ..., "micro": micro.RankStates(attachment)}, checkpoint_id=folder)
        dcp.load({"model": ..., "micro": micro.RankStates(attachment)}, checkpoint_id=folder)

    An attachment by itself has the same keys on all ranks, and of such keys that module keeps one rank's.

    torch.distributed.checkpoint asks for the keys before it knows how many ranks have saved, and fails where one is
    missing. So there are keys for NUM_KEYS ranks; that of a rank which was not there holds the number of those that
    were.

    Args:
        resize: states of another number of ranks are averaged (micro.average) and not refused. Every rank then holds
            the states of all ranks in memory while it loads them.
    """

    def __init__(self, attachment: HasRankState, *, resize: bool = False) -> None:
        self._attachment = attachment
        self._resize = resize
        self._key = f"rank{attachment.rank}"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as bytes, under a key of its own: residuals may lie in other buckets when loaded."""
        stored = io.BytesIO()
        torch.save(self._attachment.state_dict(), stored)
        rank, world_size = self._attachment.rank, self._attachment.world_size
        absent = {f"rank{other}": world_size for other in range(rank + world_size, NUM_KEYS, world_size)}
        return {self._key: stored.getvalue(), **absent}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, on the same rank; called on all ranks, which load or refuse it.

        Raises:
            ValueError: on all ranks: it has no state of this rank, or one that does not fit; see
                Attachment.load_state_dict.
        """
        with self._attachment.meet("micro.RankStates.load_state_dict", remedy=_LOADED) as entry:
            if self._key not in saved:
                raise ValueError(f"state must have the key '{self._key}', got {', '.join(saved) or 'none'}")
            own = _decoded(saved[self._key])
            number = own.get("world_size") if isinstance(own, dict) else own
            resizes = self._resize and number != self._attachment.world_size
            if resizes:
                entry.settings["resize from"] = number
            elif isinstance(own, dict):  # a rank that was not there has none, and hears of the others' refusal
                self._attachment.check_state(own)
        self._attachment.load_state_dict(self._averaged(saved) if resizes else own)

    def _averaged(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's state, from those of another number of ranks: each has read some of them."""
        read = [each for each in map(_decoded, saved.values()) if isinstance(each, dict)]
        found: Any = gather_objects(read, self._attachment.group)
        states = [state for of_rank in found for state in of_rank]
        return average(states, self._attachment.world_size)[self._attachment.rank]


class AllRanks:
    """An attachment for checkpoints that rank 0 writes alone: its state is that of all ranks.

        accelerator.register_for_checkpointing(micro.AllRanks(attachment))  # Accelerate
        fabric.save(path, {"model": model, "micro": micro.AllRanks(attachment)})  # Fabric

    ``state_dict`` is called on all ranks, as these frameworks do. Rank 0 then holds world_size times what a rank keeps
    in memory, and every rank reads that file; for large models, prefer a file per rank or RankStates.

    Args:
        everywhere: every rank gets the states of all ranks, not rank 0 alone: where each node writes a file.
        resize: states of another number of ranks are averaged (micro.average) and not refused.
    """

    def __init__(self, attachment: HasRankState, *, everywhere: bool = False, resize: bool = False) -> None:
        self._attachment = attachment
        self._everywhere = everywhere
        self._resize = resize

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, or an empty dictionary where another rank has them; called on all ranks.

        A rank may come late: after some seconds a warning names it.

        Raises:
            PeerError: on all ranks: one did not come until the time-out of the group, or began a step instead.
        """
        with self._attachment.meet("micro.AllRanks.state_dict", remedy=_SAVED):
            own = self._attachment.state_dict()
        gather = gather_objects if self._everywhere else gather_objects_at_first
        states = gather(own, self._attachment.group)
        return {} if states is None else {"ranks": states}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from this rank's share of what ``state_dict`` returned.

        Raises:
            ValueError: it does not hold the states of all ranks, or one that does not fit; see
                Attachment.load_state_dict.
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
    """Return a rank's state; or, of a rank that was not there, how many there were."""
    return state_of(stored) if isinstance(stored, bytes) else stored


def state_of(stored: bytes) -> dict[str, Any]:
    """Return the state that RankStates stored under the key of a rank, for instance to give it to micro.average."""
    state: dict[str, Any] = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    return state
