"""Bound the norm of a gradient before anything is kept of it or sent: of each worker's own, or of all alike."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from micro.comm import Comm
from micro.norms import norm
from micro.requests import AllReduce, Reduction

ClipNorm = Literal["rank", "global"]
"""The norm that is bounded: each rank's own, or one that all ranks share."""
NodeClipNorm = Literal["node", "global"]
"""The norm that is bounded where a node's ranks have one gradient: each node's own, or one that all nodes share."""


def clip_(vectors: Sequence[Tensor], limit: float) -> None:
    """Scale ``vectors``, the parts of one gradient, in place so that their common Euclidean norm is at most ``limit``.

    Norms are taken in single precision at least. A gradient with NaN or Inf stays as it is: the reducer's policy
    handles it.

    Source: Pascanu, Mikolov & Bengio, On the difficulty of training recurrent neural networks, ICML 2013,
    arXiv 1211.5063. Each worker clips its own, before error feedback: clipping the accumulator would lose mass.
    """
    _scale_(vectors, limit, _norm(vectors))


def clip_together_(vectors: Sequence[Tensor], limit: float, comm: Comm) -> Reduction[None]:
    """Scale ``vectors``, the parts of this rank's gradient, in place by the same factor on all ranks.

    What is held to ``limit`` is the root of the mean over ranks of the squared norms. The norm of the mean gradient is
    never larger, and known to nobody without dense communication. So the direction of the mean gradient stays, which it
    does not where each rank scales by a factor of its own, and a rank whose gradient is large by itself is not held
    back. One all-reduce of a float64: 16 (n-1)/n bytes, counted as counts. Where any rank holds NaN or Inf, no rank
    scales.
    """
    own = _norm(vectors)
    mine = torch.tensor([own * own], dtype=torch.float64, device=vectors[0].device)
    squares = yield AllReduce(mine=mine, kind="counts")
    _scale_(vectors, limit, math.sqrt(float(squares) / comm.world_size))  # host sync: whether to scale


def clip_shards_(shards: Sequence[Tensor], limit: float, node: Comm, nodes: Comm | None, device: torch.device) -> None:
    """Scale ``shards``, this rank's part of its node's gradient, in place by the same factor on all ranks of the node.

    What is held to ``limit`` is the norm of the node's gradient, which is that of all its shards; with ``nodes`` it is
    the root of the mean over nodes of its square, and all nodes scale alike (see clip_together_). Each is one
    all-reduce of a float64. Where any rank holds NaN or Inf, no rank of the node scales.

    Args:
        shards: may be none, where this rank's have no elements.
        node: the ranks that share the parameters.
        nodes: the ranks that hold this shard, one of each node.
    """
    own = _norm(shards) if shards else 0.0
    mine = torch.tensor([own * own], dtype=torch.float64, device=device)
    square = node.answer(AllReduce(mine=mine, kind="counts"))
    if nodes is not None:
        square = nodes.answer(AllReduce(mine=square, kind="counts")) / nodes.world_size
    _scale_(shards, limit, math.sqrt(float(square)))  # host sync: whether to scale


def clip_to_(vectors: Sequence[Tensor], limit: float, comm: Comm, *, norm: ClipNorm | str) -> Reduction[None]:
    """Scale ``vectors``, the parts of this rank's gradient, in place so that the chosen norm is at most ``limit``."""
    if norm == "global":
        yield from clip_together_(vectors, limit, comm)
    else:
        clip_(vectors, limit)


def _norm(vectors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all vectors together; in double precision where single precision overflows."""
    norms = [norm(v, dtype=torch.promote_types(v.dtype, torch.float32)) for v in vectors]
    found = float(torch.linalg.vector_norm(torch.stack(norms)))  # host sync: whether to scale
    if math.isfinite(found):
        return found
    wide = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in vectors]
    return float(torch.linalg.vector_norm(torch.stack(wide)))  # host sync: in rare steps


def _scale_(vectors: Sequence[Tensor], limit: float, norm: float) -> None:
    if math.isfinite(norm) and norm > limit:
        for vector in vectors:
            vector.mul_(limit / norm)


def check_clip(limit: float | None, norm: str = "rank", norms: Sequence[str] = get_args(ClipNorm)) -> None:
    """Raise ValueError unless the limit is positive or None, and the norm is one of ``norms``, the first by default."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
        raise ValueError(f"clip must be positive, got {limit!r}: leave it out to disable clipping")
    if norm not in norms:
        raise ValueError(f"clip_norm must be one of {', '.join(norms)}, got {norm!r}")
    if limit is None and norm != norms[0]:
        raise ValueError(f"clip_norm={norm} needs a clip: set it, or leave clip_norm out")
