"""Add values at indices, in lists of a fixed size of which some places are empty."""

import triton.language as tl
from torch import Tensor

from micro.kernels.triton.launching import ALIGNED, BLOCK, kernel, launch, num_programs


@kernel
def _wide(x: tl.tensor) -> tl.tensor:
    """Return ``x`` in single precision at least."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@kernel
def _add_at(
    vector: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    numel: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
) -> None:
    """Add the values at ``places`` of the lists."""
    targets = tl.load(indices + places, mask=mask, other=-1)
    used = (targets >= 0) & (targets < numel)
    added = tl.load(values + places, mask=mask & used, other=0)
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
    block = tl.program_id(0)
    whole = count // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < tl.num_programs(0) - 1:
        places = block * BLOCK + lanes
        _add_at(vector, indices, values, numel, places, places < whole)
    else:
        places = whole + lanes
        _add_at(vector, indices, values, numel, places, places < count)


def scatter_add_(vector: Tensor, indices: Tensor, values: Tensor) -> None:
    """Add ``values`` (m,) to ``vector`` (numel,) at ``indices`` (m,) int32; skip indices outside.

    No index inside of the vector is there twice: sums are the same bits whatever the order.
    """
    count = indices.numel()
    constants = {"ALIGNED": ALIGNED, "BLOCK": BLOCK}
    arguments = (vector, indices, values, vector.numel(), count)
    launch(scatter_kernel, num_programs(count, BLOCK), vector, *arguments, **constants)
