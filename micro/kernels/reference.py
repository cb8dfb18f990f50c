"""What the kernels compute, in plain torch: the oracle of their tests and the fallback where they cannot run."""

import torch
from torch import Tensor


def above(x: Tensor, threshold: float) -> Tensor:
    """Return the ascending (k,) int32 indices of ``x`` (numel,) with abs(x) >= threshold."""
    return torch.nonzero(x.abs() >= threshold).view(-1).to(torch.int32)


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
