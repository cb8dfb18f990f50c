"""Clip gradients by norm before the residual is added: each rank by its own norm, or all by a common factor."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Reduction
from micro.values.norms import norm

ClipNorm = Literal["rank", "global"]
"""The norm that is bounded: each rank's own, or one that all ranks share."""
NodeClipNorm = Literal["node", "global"]
"""The norm that is bounded where a node's ranks have one gradient: each node's own, or one that all nodes share."""


def clip_(
    vectors: Sequence[Tensor],
    limit: float,
    *,
    within: Comm | None = None,
    among: Comm | None = None,
    device: torch.device | None = None,
) -> Reduction[None]:
    """Scale ``vectors``, the parts of one gradient, in place so that their common Euclidean norm is at most ``limit``.

    With ``among`` all those ranks scale by the same factor: what is bounded is the root of the mean over them of the
    squared norms. The norm of the mean gradient is never larger, and known to nobody without dense communication. So
    the direction of the mean gradient stays, and a rank whose gradient is large by itself is not held back.

    Norms are taken in single precision at least. Where any rank that takes part holds NaN or Inf, none scales: the
    reducer's policy handles it.

    Args:
        vectors: may be none, where they are shards and this rank's have no elements.
        within: the ranks that hold the other parts of this gradient, one shard each.
        among: the ranks that have gradients of their own, for one norm of all.
        device: of the messages; by default that of the vectors.

    Source: Pascanu, Mikolov & Bengio, On the difficulty of training recurrent neural networks, ICML 2013,
    arXiv 1211.5063. Each worker clips its own, before error feedback: clipping the accumulator would lose mass.
    """
    found = _norm(vectors)
    if within is not None or among is not None:
        square = torch.tensor([found * found], dtype=torch.float64, device=device or vectors[0].device)
        if within is not None:
            square = yield AllReduce(mine=square, kind="counts", comm=within)
        if among is not None:
            square = (yield AllReduce(mine=square, kind="counts", comm=among)) / among.world_size
        found = math.sqrt(float(square))  # host sync: whether to scale
    if math.isfinite(found) and found > limit:
        for vector in vectors:
            vector.mul_(limit / found)


def _norm(vectors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all vectors together; in double precision where single precision overflows."""
    if not vectors:
        return 0.0
    norms = [norm(v, dtype=torch.promote_types(v.dtype, torch.float32)) for v in vectors]
    found = float(torch.linalg.vector_norm(torch.stack(norms)))  # host sync: whether to scale
    if math.isfinite(found):
        return found
    wide = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in vectors]
    return float(torch.linalg.vector_norm(torch.stack(wide)))  # host sync: in rare steps


def check_clip(limit: float | None, norm: str = "rank", norms: Sequence[str] = get_args(ClipNorm)) -> None:
    """Raise ValueError unless the limit is positive or None, and the norm is one of ``norms``, the first by default."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
        raise ValueError(f"clip must be positive, got {limit!r}: leave it out to disable clipping")
    if norm not in norms:
        raise ValueError(f"clip_norm must be one of {', '.join(norms)}, got {norm!r}")
    if limit is None and norm != norms[0]:
        raise ValueError(f"clip_norm={norm} needs a clip: set it, or leave clip_norm out")
