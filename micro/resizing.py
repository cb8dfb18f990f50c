"""Resume with another number of workers: from the saved states of n ranks to those of m."""

from collections.abc import Sequence
from typing import Any

import torch

from micro.reducers.base import Reducer, saved_layout


def average(reducer: Reducer, ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the buckets that each worker of the new group starts with, from those that every old rank saved.

    What is kept for each parameter, the residual above all, becomes its mean over the old ranks. The model moves by the
    mean over the workers of what they send, so with n old and m new ranks what is still to be sent stays the same:
    ``sum(old) / n == sum(new) / m``. Thresholds and boundaries belong to the old group: selector, exchange, density
    and factors start from their initial state.

    Args:
        ranks: what ``Reducer.save`` returned for each bucket, the same buckets on each rank.

    Raises:
        ValueError: another method saved them.
    """
    return [_mean(reducer, saved) for saved in zip(*ranks, strict=True)]


def _mean(reducer: Reducer, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    layout = saved_layout(saved[0])
    dtypes = {piece.dtype for pieces in saved[0]["memory"].values() for piece in pieces.values()}
    dtype, device = next(iter(dtypes), torch.float32), torch.device("cpu")
    states = [reducer.load(bucket, dtype, device) for bucket in saved]
    mean = reducer.start(layout, dtype, device)
    mean.step = states[0].step
    for key, vector in mean.memory.items():
        if vector.numel():
            mean.memory[key] = torch.stack([state.memory[key] for state in states]).mean(0)
    return reducer.save(mean)
