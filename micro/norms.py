"""Norms of vectors of any length."""

import torch
from torch import Tensor

CHUNK = 1 << 18  # elements whose norm is off by some 1e-6; with 2^24 it is 7e-4, with 2^28 a third


def norm(vector: Tensor, order: float = 2.0, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the norm () of ``vector`` (numel,), in ``dtype`` or its own.

    On the CPU torch adds up single precision in a few sums that run over the whole vector: each stops to grow at 2^24
    times its terms. So long vectors are taken in chunks, whose norms are then taken together.
    """
    if vector.device.type != "cpu" or vector.numel() <= CHUNK:
        return _norm(vector, order, dtype)
    return _norm(torch.stack([_norm(chunk, order, dtype) for chunk in vector.split(CHUNK)]), order, dtype)


def _norm(vector: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(vector, order, dtype=dtype)
    return found


def norms_of(vector: Tensor, sizes: list[int]) -> Tensor:
    """Return the L2 norm of each neighbouring piece (L,) of ``vector``, in its dtype: one read, nothing copied."""
    pieces = vector.split(sizes)
    if vector.device.type == "cpu" and max(sizes, default=0) > CHUNK:
        return torch.stack([norm(piece) for piece in pieces])
    return torch.stack(torch._foreach_norm(pieces))
