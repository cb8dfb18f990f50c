"""What the kernels compute, in plain torch: the oracle of their tests and the fallback where they cannot run."""

import torch
from torch import Tensor

INFINITY_BITS = 0x7F800000  # as a float32; larger patterns are NaN


def above(x: Tensor, threshold: float) -> Tensor:
    """Return the ascending (k,) int32 indices of ``x`` (numel,) with abs(x) >= threshold."""
    return torch.nonzero(x.abs() >= threshold).view(-1).to(torch.int32)


def magnitude_counts(x: Tensor, first_bit_pattern: int, shift: int, num_bins: int) -> Tensor:
    """Return (num_bins,) int32 counts of magnitudes by ranges of float32 bit patterns."""
    bits = x.to(torch.float32).abs().view(torch.int32)
    bits = bits[(bits >= max(first_bit_pattern, 1)) & (bits < INFINITY_BITS)]
    bins = (bits - first_bit_pattern) >> shift
    return torch.bincount(bins[bins < num_bins], minlength=num_bins).to(torch.int32)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending (min(k, numel),) int32 indices of the k largest magnitudes; ties go to the lowest index."""
    if k >= x.numel():
        return torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    magnitudes = x.abs()
    smallest = torch.topk(magnitudes, k, sorted=False).values.min()
    keep = magnitudes > smallest
    ties = torch.nonzero(magnitudes == smallest).view(-1)
    keep[ties[: k - int(keep.sum())]] = True  # host sync: how many ties to take
    return torch.nonzero(keep).view(-1).to(torch.int32)
