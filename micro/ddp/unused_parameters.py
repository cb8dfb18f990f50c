"""Parameters that no rank used in a step: what is kept for them must stay, because DDP drops their update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from micro.comm import Comm
from micro.reducers.base import BucketState
from micro.requests import AllReduce


def unused_parameters(state: BucketState, gradients: Sequence[Tensor], comm: Comm) -> list[str]:
    """Return the names of the bucket's parameters that no rank used; all ranks call it together.

    Args:
        gradients: this rank's, one per parameter of the bucket; empty where DDP does not look for unused parameters.
    """
    if not gradients or not state.pieces():
        return []
    used = torch.stack([gradient.any() for gradient in gradients]).to(torch.int32)
    flags = comm.answer(AllReduce(mine=used, kind="counts")).tolist()  # host sync: which are unused
    return [name for name, is_used in zip(state.layout.names, flags, strict=True) if not is_used]
