"""Magnitudes by the bits of a float32, which as integers order like them."""

import math
import struct

import torch

NUM_BINS = 32  # of the magnitudes of candidates, whose counts each rank sends: 128 bytes
LARGEST = 3.4e38  # about the largest float32


def magnitude_of(bits: int) -> float:
    """Return the number whose float32 has these bits."""
    value: float = struct.unpack("=f", struct.pack("=i", bits))[0]
    return value


def bits_of_magnitude(value: float) -> int:
    """Return the bits of a magnitude as a float32; what is larger than any counts as the largest."""
    bits: int = struct.unpack("=i", struct.pack("=f", min(value, LARGEST)))[0]
    return bits


def reaching(lowest: int, dtype: torch.dtype) -> float:
    """Return the smallest number of ``dtype`` that as a float32 is the magnitude with the bits ``lowest`` or more.

    Histograms and bins count float32. In double precision some numbers just below that magnitude are rounded to it.
    """
    magnitude = magnitude_of(lowest)
    if dtype != torch.float64:
        return magnitude
    middle = (magnitude_of(lowest - 1) + magnitude) / 2
    return math.nextafter(middle, math.inf) if lowest % 2 else middle  # ties are rounded to even bits
