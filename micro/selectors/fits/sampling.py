"""Sample a vector, to estimate a threshold without reading all of it."""

import torch
from torch import Tensor

from micro import kernels
from micro.values.randomness import generator
from micro.values.sparse import Step


def strided_sample(acc: Tensor, stride: int, step: Step, rank: int) -> Tensor:
    """Return the magnitudes of every ``stride``-th entry of ``acc`` (numel,), with a random start."""
    phase = int(torch.randint(stride, (1,), generator=generator(step.seed, step.index, rank)))
    return acc[phase::stride].abs()


def odd_stride(numel: int, sample_size: int) -> int:
    """Return the largest odd stride that samples at least ``sample_size`` of ``numel`` entries; 1 if there are fewer.

    Rows and channels of parameters mostly have even lengths; an odd stride reaches all positions in them.
    """
    stride = max(1, numel // max(sample_size, 1))
    return stride - (stride % 2 == 0)


def smallest_of_largest(sample: Tensor, count: int) -> float:
    """Return the ``count``-th largest number of ``sample`` (m,), or the smallest if there are fewer."""
    return float(kernels.ranked(sample, (min(count, sample.numel()),)))  # host sync: the scan's threshold
