"""Every rank's state in one checkpoint: of torch.distributed.checkpoint, or of one that rank 0 writes for all."""

import io
from typing import Any, Protocol

import torch

from micro.checkpoints.resizing import average
from micro.objects import gather_objects, gather_objects_at_first


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

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""


class RankStates:
    """An attachment as torch.distributed.checkpoint takes it: one key per rank, so that every rank's state is kept.

        dcp.save({"model": ..., "micro": micro.RankStates(attachment)}, checkpoint_id=folder)
        dcp.load({"model": ..., "micro": micro.RankStates(attachment)}, checkpoint_id=folder)

    An attachment by itself has the same keys on all ranks, and of such keys that module keeps one rank's.
    """

    def __init__(self, attachment: HasRankState) -> None:
        self._attachment = attachment
        self._key = f"rank{attachment.rank}"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as bytes, under a key of its own: residuals may lie in other buckets when loaded."""
        stored = io.BytesIO()
        torch.save(self._attachment.state_dict(), stored)
        return {self._key: stored.getvalue()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, on the same rank.

        Raises:
            ValueError: it has no state of this rank, or one that does not fit; see Attachment.load_state_dict.
        """
        if self._key not in saved:
            raise ValueError(f"state must have the key '{self._key}', got {', '.join(saved) or 'none'}")
        self._attachment.load_state_dict(state_of(saved[self._key]))


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
        """Return the states of all ranks, or an empty dictionary where another rank has them; called on all ranks."""
        gather = gather_objects if self._everywhere else gather_objects_at_first
        states = gather(self._attachment.state_dict(), self._attachment.group)
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


def state_of(stored: bytes) -> dict[str, Any]:
    """Return the state that RankStates stored under the key of a rank, for instance to give it to micro.average."""
    state: dict[str, Any] = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    return state
