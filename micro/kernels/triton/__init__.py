"""The loops on a GPU, written in Triton. micro.kernels imports them when it first meets a tensor of a GPU."""

from micro.kernels.reference import above_by_piece, kth_by_run
from micro.kernels.triton.absorbing import absorb_, absorb_flagged_
from micro.kernels.triton.checking import check
from micro.kernels.triton.launching import takes
from micro.kernels.triton.scanning import above, largest, magnitude_counts

__all__ = [
    "above",
    "above_by_piece",
    "absorb_",
    "absorb_flagged_",
    "check",
    "kth_by_run",
    "largest",
    "magnitude_counts",
    "takes",
]
