"""Parameters that no rank used in a step: what is kept for them must stay, because DDP drops their update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from micro.comm import Comm
from micro.reducers.base import BucketState


class UnusedSetAside:
    """What is kept for the unused parameters of a bucket, taken out of its state while the bucket is reduced.

    Args:
        gradients: this rank's, one per parameter of the bucket; empty where DDP does not look for unused parameters.
    """

    def __init__(self, state: BucketState, gradients: Sequence[Tensor], comm: Comm) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []
        pieces = state.pieces()
        if not gradients or not pieces:
            return
        used = torch.stack([gradient.any() for gradient in gradients]).to(torch.int32)
        comm.all_reduce_(used, "counts")
        for name, is_used in zip(state.layout.names, used.tolist(), strict=True):  # host sync: which are unused
            if not is_used:
                for piece in [by_name[name] for by_name in pieces.values() if name in by_name]:
                    self._kept.append((piece, piece.clone()))
                    piece.zero_()

    def restore(self) -> None:
        """Put it back: after the reduction, and once more where that was taken back."""
        for piece, kept in self._kept:
            piece.copy_(kept)
