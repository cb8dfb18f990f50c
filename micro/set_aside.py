"""What is kept for some parameters of a bucket, taken out of its state while the bucket is reduced."""

from collections.abc import Collection

from torch import Tensor

from micro.reducers.base import BucketState


class SetAside:
    """Holds what a bucket's state keeps for ``names``, which no rank used in a step: their update is dropped.

    Args:
        state: of the bucket; zero for these parameters from now on.
    """

    def __init__(self, state: BucketState, names: Collection[str]) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []
        for by_name in state.pieces(set(names)).values() if names else ():
            for piece in by_name.values():
                self._kept.append((piece, piece.clone()))
                piece.zero_()

    def restore(self) -> None:
        """Put it back: after the reduction, and once more where that was taken back."""
        for piece, kept in self._kept:
            piece.copy_(kept)
