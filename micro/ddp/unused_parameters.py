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
    vectors = {key: vector for key, vector in state.memory.items() if vector.numel()}
    if not gradients or not vectors:
        yield
        return
    used = torch.stack([gradient.any() for gradient in gradients]).to(torch.int32)
    comm.all_reduce_(used, "counts")
    set_aside = []
    for (_, place), is_used in zip(state.layout.slices(), used.tolist(), strict=True):  # host sync: which are unused
        if not is_used:
            for key, vector in vectors.items():
                set_aside.append((key, place, vector[place].clone()))
                vector[place] = 0
    try:
        yield
    finally:
        for key, place, kept in set_aside:
            state.memory[key][place] = kept
