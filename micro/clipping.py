"""Bound the norm of one worker's gradient before anything is kept of it or sent."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def clip_(vectors: Sequence[Tensor], limit: float) -> None:
    """Scale ``vectors``, the parts of one gradient, in place so that their common Euclidean norm is at most ``limit``.

    A gradient whose norm is NaN or infinite stays as it is: the reducer's policy handles it.

    Source: Pascanu, Mikolov & Bengio, On the difficulty of training recurrent neural networks, ICML 2013,
    arXiv 1211.5063. Each worker clips its own, before error feedback: clipping the accumulator would lose mass.
    """
    norms = torch.stack([torch.linalg.vector_norm(vector) for vector in vectors])
    norm = float(torch.linalg.vector_norm(norms))  # host sync: whether to scale
    if math.isfinite(norm) and norm > limit:
        for vector in vectors:
            vector.mul_(limit / norm)


def check_clip(limit: float | None) -> None:
    """Raise ValueError unless the limit is positive or None."""
    if limit is not None and not (isinstance(limit, int | float) and limit > 0):
        raise ValueError(f"clip must be positive, got {limit!r}: leave it out to disable clipping")
