"""Compiled loops over pieces of a vector on a CPU: a threshold, or a rank, for each."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels.cpu import above_thresholds, bits_of
from micro.kernels.jit import INFINITY_BITS, jitted


def above_by_piece(x: Tensor, pieces: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `above` does, with one threshold (S,) for each piece [start, stop) of ``pieces`` (S, 2) int64."""
    return above_thresholds(x, pieces.numpy(), thresholds.numpy())


@jitted
def _kth_by_run(bits: Any, lengths: Any, ranks: Any) -> Any:
    kth = np.empty(lengths.size, np.int32)
    first = 0
    for run in range(lengths.size):
        length, rank = lengths[run], ranks[run]
        if rank < 1:
            kth[run] = INFINITY_BITS
        elif rank > length:
            kth[run] = 0
        else:
            kth[run] = np.partition(bits[first : first + length], length - rank)[length - rank]
        first += length
    return kth


def kth_by_run(magnitudes: Tensor, lengths: Tensor, ranks: Tensor) -> Tensor:
    """Return the ``ranks[s]``-th largest (S,) of contiguous float32 ``magnitudes`` in each run; see micro.kernels."""
    bits = bits_of(magnitudes)
    return torch.from_numpy(_kth_by_run(bits, lengths.numpy(), ranks.numpy())).view(torch.float32)
