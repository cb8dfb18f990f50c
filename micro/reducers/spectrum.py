"""Bins of a spectrum: the strongest of a vector's, and the vector that gathered ones stand for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from micro import kernels
from micro.transforms import from_spectrum_


@dataclass(frozen=True, slots=True)
class Bins:
    """What one rank sends: ``indices`` (k,) int32 of the spectrum's bins, their ``values`` (k,) complex."""

    indices: Tensor
    values: Tensor


def strongest(spectrum: Tensor, count: int) -> tuple[Bins, Tensor]:
    """Return the ``count`` bins of most energy, and the magnitudes (F,) of all others, zero where a bin is kept.

    Where the transform overflowed, which takes gradients near the largest number there is, bins are cut at that number.
    """
    magnitudes = spectrum.abs().nan_to_num_()
    indices = kernels.largest(magnitudes, count)
    magnitudes.index_fill_(0, indices.long(), 0.0)
    return Bins(indices, complex_bins(real_parts(spectrum.index_select(0, indices)).nan_to_num_())), magnitudes


def vector_of(parts: Sequence[Bins], spectrum: Tensor, numel: int) -> Tensor:
    """Return the vector (numel,) whose spectrum is the sum of ``parts``; ``spectrum`` (F,) is overwritten for it."""
    spectrum.zero_()
    for part in parts:
        spectrum.index_add_(0, part.indices, part.values)
    return from_spectrum_(spectrum, numel)


def real_parts(bins: Tensor) -> Tensor:
    """Return real and imaginary parts (2 k,), in turn, of complex ``bins`` (k,); not copied."""
    return torch.view_as_real(bins).view(-1)


def complex_bins(parts: Tensor) -> Tensor:
    """Return the bins (k,) that ``real_parts`` took apart; copied only where they lie at an odd place of a message."""
    if parts.storage_offset() % 2:
        parts = parts.clone()
    return torch.view_as_complex(parts.view(-1, 2))
