"""Find the largest magnitudes of a long vector by a sample and one scan."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Scan = Callable[[Tensor, float], tuple[Tensor, Tensor]]  # as `above`
Choice = Callable[[Tensor, int], Tensor]  # as `largest`
SAMPLE = 1 << 13  # enough for a few percent on the k-th magnitude; a wrong guess costs one more scan, never exactness


def sampled_largest(x: Tensor, k: int, scan: Scan, of_few: Choice) -> Tensor:
    """Do what `largest` does, 1 <= k < numel, by a scan of long vectors; exact.

    Where too few reach what the sample says, the scan is repeated with a lower magnitude.
    """
    doubled = 0
    while (guess := magnitude_near(x, k, doubled)) is not None:
        candidates, magnitudes = scan(x, float(guess))  # host sync: the scan's threshold
        if candidates.numel() >= k:
            return candidates.index_select(0, of_few(magnitudes, k))
        doubled += 1
    return of_few(x, k)


def magnitude_near(x: Tensor, k: int, doubled: int = 0) -> Tensor | None:
    """Return the magnitude () that a few more than k of a long vector reach, by a sample, or twice as many, or more."""
    numel = x.numel()
    if numel <= 2 * SAMPLE or not 0 < 4 * k <= numel:
        return None
    sample = x[:: numel // SAMPLE].abs()
    expected = sample.numel() * k / numel
    rank = math.ceil(expected + 3 * math.sqrt(expected) + 1) << doubled
    return torch.topk(sample, rank, sorted=False).values.min() if rank < sample.numel() else None
