"""How many magnitudes lie where: the wide histogram from which a threshold is found without knowing anything."""

import torch
from torch import Tensor

SHIFT = 20  # a bin is a float32's exponent and its three highest mantissa bits: 6 to 12 % wide
NUM_BINS = 0x7F800000 >> SHIFT  # up to infinity, which is left out


def magnitude_bins(x: Tensor) -> Tensor:
    """Return (NUM_BINS,) int64 counts of ``x`` (m,) by magnitude; zeros, NaN and infinity are not counted."""
    bits = x.to(torch.float32).abs().view(torch.int32)
    counts = torch.bincount(bits >> SHIFT, minlength=NUM_BINS)[:NUM_BINS]
    counts[0] -= (bits == 0).sum()
    return counts
