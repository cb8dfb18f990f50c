"""Find the magnitude that k entries of all ranks reach, from two histograms that are summed over the ranks.

`magnitude_bins` counts in a wide histogram, `coarse_bin` picks the bin of it in which the magnitude lies, `bins_inside`
counts inside of that bin, and `threshold_from_bins` gives the threshold. Scaling the input by c scales it by c.
"""

from torch import Tensor

from micro import kernels
from micro.kernels.bit_patterns import magnitude_of

SHIFT = 20  # a bin is a float32's exponent and its three highest mantissa bits: 6 to 12 % wide
NUM_MAGNITUDE_BINS = 0x7F800000 >> SHIFT  # up to infinity, which is left out
FINE_SHIFT = SHIFT - 11  # a fine bin is 1 / 2048 of a coarse one: 1 part in 8192 or less


def magnitude_bins(x: Tensor) -> Tensor:
    """Return (NUM_MAGNITUDE_BINS,) int32 counts of ``x`` (m,) by magnitude; zeros, NaN and infinity are not counted."""
    return kernels.magnitude_counts(x, first_bit_pattern=0, shift=SHIFT, num_bins=NUM_MAGNITUDE_BINS)


def coarse_bin(counts: Tensor, k: int) -> int | None:
    """Return the bin of summed `magnitude_bins` that `bins_inside` has to resolve; None where all entries are zero."""
    found = _locate(counts, k + 1)
    return found[0] if found else None


def bins_inside(x: Tensor, coarse: int) -> Tensor:
    """Return (2048,) int32 counts of those of ``x`` (any floating dtype) that lie in one bin of the wide histogram."""
    return kernels.magnitude_counts(x, first_bit_pattern=coarse << SHIFT, shift=FINE_SHIFT, num_bins=2048)


def threshold_from_bins(counts: Tensor, fine: Tensor, k: int) -> float | None:
    """Return the threshold that k magnitudes reach, as near as two histograms show, or None where all are zero.

    It lies just above the (k + 1)-th largest, which leaves the tail of the selected unbiased. A tie across k is taken
    whole or left whole, whichever count is nearer to k by ratio, but something is always selected. Where there are at
    most k magnitudes, all are.

    Args:
        counts: (num_bins,) from `magnitude_bins`, summed over the ranks.
        fine: (2048,) from `bins_inside(x, coarse_bin(counts, k))`, summed over the ranks.
        k: wanted number of entries, >= 1.
    Returns:
        A positive float, exact in float32.
    """
    found = _locate(counts, k + 1)
    if found is None:
        return None
    coarse, above_coarse = found
    found = _locate(fine, k + 1 - above_coarse)
    assert found is not None, "the coarse bin that was located holds something"
    within, above_fine = found
    above = above_coarse + above_fine
    reached = above + int(fine[within])
    if reached > k and above * reached >= k * k:
        within += 1  # the edge above the tie leaves the nearer count
    return magnitude_of(max((coarse << SHIFT) + (within << FINE_SHIFT), 1))


def _locate(counts: Tensor, rank: int) -> tuple[int, int] | None:
    """Return (bin of the rank-th largest, or of the smallest if there are fewer; entries above it); None if empty."""
    reached = 0
    found = None
    for index, count in reversed(list(enumerate(counts.tolist()))):  # host sync: a searched step only
        if count and reached < rank:
            found, reached = (index, reached), reached + count
    return found
