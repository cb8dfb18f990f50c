"""Entries of a vector at given indices: read, added to, taken away; compiled where that serves, else by torch."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from micro import kernels

FEWEST = 8192  # entries from which a compiled loop saves more time than its call takes


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``x`` (numel,) at ``indices`` (m,) int32."""
    loops = _loops(indices, x)
    return x.index_select(0, indices) if loops is None else loops.gather(x, indices)


def add_(x: Tensor, indices: Tensor, values: Tensor, *, alpha: float = 1.0) -> None:
    """Add ``alpha`` times ``values`` (m,) to ``x`` (numel,) at ``indices`` (m,) int32."""
    loops = _loops(indices, x, values) if alpha == 1 else None
    if loops is None:
        x.index_add_(0, indices, values.to(x.dtype), alpha=alpha)
    else:
        loops.add_(x, indices, values)


def take_(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Subtract ``values`` (m,) from ``x`` (numel,) at unique ``indices`` (m,) int32; return what was there."""
    loops = _loops(indices, x, values)
    if loops is None:
        before = gather(x, indices)
        add_(x, indices, values, alpha=-1.0)
    else:
        before = loops.take_(x, indices, values)
    return before


def _loops(indices: Tensor, *vectors: Tensor) -> ModuleType | None:
    """Return the compiled loops where they serve these tensors: indices as long as the values, all on a CPU."""
    if indices.numel() < FEWEST:
        return None
    fits = indices.device.type == "cpu" and indices.dtype == torch.int32 and indices.is_contiguous()
    fits = fits and all(values.numel() == indices.numel() for values in vectors[1:])
    return _compiled() if fits and all(map(kernels.compiled, vectors)) else None


@cache
def _compiled() -> ModuleType:
    from micro.kernels import placing

    return placing
