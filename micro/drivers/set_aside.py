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
        self._state = state
        self._names = set(names)
        self._kept: list[Tensor] = []
        for piece in self._pieces():
            self._kept.append(piece.clone())
            piece.zero_()

    def restore(self) -> None:
        """Put it back: after the reduction, and once more where that was taken back."""
        for piece, kept in zip(self._pieces() if self._kept else (), self._kept, strict=True):
            piece.copy_(kept)

    def _pieces(self) -> list[Tensor]:
        """Return views of what is kept for the parameters, in the same order each time; a step may move the memory."""
        kept = self._state.pieces(self._names).values() if self._names else ()
        return [piece for by_name in kept for piece in by_name.values()]
