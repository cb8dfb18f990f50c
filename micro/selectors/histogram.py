"""How many magnitudes lie where: the wide histogram from which a threshold is found without knowing anything."""

from torch import Tensor

from micro import kernels

SHIFT = 20  # a bin is a float32's exponent and its three highest mantissa bits: 6 to 12 % wide
NUM_MAGNITUDE_BINS = 0x7F800000 >> SHIFT  # up to infinity, which is left out


def magnitude_bins(x: Tensor) -> Tensor:
    """Return (NUM_MAGNITUDE_BINS,) int32 counts of ``x`` (m,) by magnitude; zeros, NaN and infinity are not counted."""
    return kernels.magnitude_counts(x, first_bit_pattern=0, shift=SHIFT, num_bins=NUM_MAGNITUDE_BINS)
