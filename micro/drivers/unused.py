"""Keep what waits for parameters that no rank has used out of a step: they get no update."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from micro.comm.loop import Reduce
from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Reduction, known
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome


def without_unused(
    reduce: Reduce[Outcome], state: BucketState, unused: Callable[[], Reduction[Collection[str]]], comm: Comm
) -> Reduction[Outcome]:
    """Reduce a bucket; what is kept for parameters that no rank has used takes no part, and waits."""
    kept = set_aside_(state, (yield from unused()))
    outcome = yield from reduce(comm)

    def and_restore(end: Callable[[], object]) -> None:
        end()
        restore_(state, kept)

    on_deliver, on_drop = partial(and_restore, outcome.on_deliver), partial(and_restore, outcome.on_drop)
    return replace(outcome, on_deliver=on_deliver, on_drop=on_drop)


def set_aside_(state: BucketState, names: Collection[str]) -> dict[tuple[str, str], Tensor]:
    """Take what is kept for these parameters out of a state; return it, by key and parameter."""
    kept = {}
    for key, pieces in state.pieces(set(names)).items() if names else ():
        for name, piece in pieces.items():
            kept[key, name] = piece.clone()
            piece.zero_()
    return kept


def restore_(state: BucketState, kept: Mapping[tuple[str, str], Tensor]) -> None:
    """Put what was set aside back into a state, whose memory a step may have moved."""
    if kept:
        pieces = state.pieces({name for _, name in kept})
        for (key, name), piece in kept.items():
            pieces[key][name].copy_(piece)


def unused_of(buckets: Sequence[Any]) -> Reduction[list[str]]:
    """Return the parameters of these buckets that no rank used; DDP drops their update."""
    names = [name for bucket in buckets for name in bucket.layout.names]
    gradients = [gradient for bucket in buckets for gradient in bucket.layout.split(bucket.grad).values()]
    used = torch.stack([gradient.any() for gradient in gradients]).to(torch.int32)
    (flags,) = yield from known((yield AllReduce(mine=used, kind="counts")))
    return [name for name, is_used in zip(names, flags.tolist(), strict=True) if not is_used]
