"""Magnitudes as the bits of float32 numbers, which order like them."""

import struct

LARGEST = 3.4e38  # about the largest float32


def magnitude_of(bits: int) -> float:
    """Return the number whose float32 has these bits."""
    value: float = struct.unpack("=f", struct.pack("=i", bits))[0]
    return value


def bits_of_magnitude(value: float) -> int:
    """Return the bits of a magnitude as a float32; what is larger than any counts as the largest."""
    bits: int = struct.unpack("=i", struct.pack("=f", min(value, LARGEST)))[0]
    return bits
