"""Add values at indices, in lists of a fixed size of which some places are empty."""

import triton.language as tl
from torch import Tensor

from micro.kernels.triton.launching import ALIGNED, BLOCK, each_block, kernel, launch, num_programs


@kernel
def _wide(x: tl.tensor) -> tl.tensor:
    """Return ``x`` in single precision at least."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@kernel
def _add_at(arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> None:
    vector, indices, values, numel = arguments
    targets = tl.load(indices + offsets, mask=mask, other=-1)
    used = (targets >= 0) & (targets < numel)
    added = tl.load(values + offsets, mask=mask & used, other=0)
    old = tl.load(vector + targets, mask=used, other=0)
    tl.store(vector + targets, _wide(old) + _wide(added), mask=used)


@kernel
def scatter_kernel(
    vector: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    numel: tl.tensor,
    count: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add ``values`` (count,) to ``vector`` (numel,) at ``indices`` (count,), each used once."""
    each_block(count, _add_at, (vector, indices, values, numel), (), ALIGNED, BLOCK)


def scatter_add_(vector: Tensor, indices: Tensor, values: Tensor) -> None:
    """Add ``values`` (m,) to ``vector`` (numel,) at ``indices`` (m,) int32; skip indices outside.

    No index inside of the vector is there twice: sums are the same bits whatever the order.
    """
    count = indices.numel()
    constants = {"ALIGNED": ALIGNED, "BLOCK": BLOCK}
    arguments = (vector, indices, values, vector.numel(), count)
    launch(scatter_kernel, num_programs(count, BLOCK), vector, *arguments, **constants)
