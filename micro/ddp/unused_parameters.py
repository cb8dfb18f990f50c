"""Parameters that no rank used in a step: what is kept for them must stay, because DDP drops their update."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from micro.comm import Comm
from micro.reducers.base import BucketState


@contextmanager
def unused_set_aside(state: BucketState, gradients: Sequence[Tensor], comm: Comm) -> Iterator[None]:
    """Take what is kept for unused parameters out of the state while this context lasts.

    Args:
        gradients: this rank's, one per parameter of the bucket; empty where DDP does not look for unused parameters.
    """
    pieces = state.pieces()
    if not gradients or not pieces:
        yield
        return
    used = torch.stack([gradient.any() for gradient in gradients]).to(torch.int32)
    comm.all_reduce_(used, "counts")
    set_aside: list[tuple[Tensor, Tensor]] = []
    for name, is_used in zip(state.layout.names, used.tolist(), strict=True):  # host sync: which are unused
        if not is_used:
            for piece in [by_name[name] for by_name in pieces.values() if name in by_name]:
                set_aside.append((piece, piece.clone()))
                piece.zero_()
    try:
        yield
    finally:
        for piece, kept in set_aside:
            piece.copy_(kept)
