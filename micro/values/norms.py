"""Norms of vectors of any length."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

SMALLEST, LARGEST = 1e-15, 1e15  # norms whose squares, and those of their parts, single precision holds
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


def rows_of(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return how many neighbouring pieces have one length, and that length, for each run of them."""
    return tuple((len(list(run)), size) for size, run in groupby(sizes))


def norms_of(vector: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
    """Return the L2 norm of each neighbouring piece (L,) float64 of ``vector``: one read, nothing copied.

    On the CPU double precision adds up where single precision would lose the squares of one of them: it is slower.

    Args:
        rows: the lengths of the pieces, by `rows_of`.
    """
    if vector.device.type != "cpu":
        sizes = [size for count, size in rows for _ in range(count)]
        return torch.stack(torch._foreach_norm(vector.split(sizes), dtype=torch.float64))
    norms = _norms_of(vector, rows, None).double()
    holds = ((norms > SMALLEST) & (norms < LARGEST)).all()
    return norms if holds else _norms_of(vector, rows, torch.float64)


def _norms_of(vector: Tensor, rows: Sequence[tuple[int, int]], dtype: torch.dtype | None) -> Tensor:
    """Return the same in ``dtype`` or the vector's own.

    Pieces of one length that follow each other are the rows of a matrix: a call for all of them. The norm of a row has
    the bits that the piece has alone.
    """
    pairs = list(zip(vector.split([count * size for count, size in rows]), rows, strict=True))
    if max((size for _, size in rows), default=0) > CHUNK:
        return torch.stack([norm(piece, dtype=dtype) for part, shape in pairs for piece in part.view(shape)])
    return torch.cat([torch.linalg.vector_norm(part.view(shape), dim=1, dtype=dtype) for part, shape in pairs])
