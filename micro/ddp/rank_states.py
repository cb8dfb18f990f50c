"""Every rank's state in one checkpoint of torch.distributed.checkpoint."""

import io
from typing import Any

import torch

from micro.ddp.attachment import Attachment


class RankStates:
    """An attachment as torch.distributed.checkpoint takes it: one key per rank, so that every rank's state is kept.

        dcp.save({"model": ..., "micro": micro.RankStates(attachment)}, checkpoint_id=folder)
        dcp.load({"model": ..., "micro": micro.RankStates(attachment)}, checkpoint_id=folder)

    An attachment by itself has the same keys on all ranks, and of such keys that module keeps one rank's.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._key = f"rank{attachment.comm.rank}"

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


def state_of(stored: bytes) -> dict[str, Any]:
    """Return the state that RankStates stored under the key of a rank, for instance to give it to micro.average."""
    state: dict[str, Any] = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    return state
