"""The codec range_float: N-bit floats whose range ends at the largest value of a message."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key, from_bytes, to_bytes
from micro.codecs.bits import num_packed_bytes, pack, unpack

SINGLE_MANTISSA = 23
MAGNITUDE = 0x7FFFFFFF  # the bits of a single-precision number without its sign
LARGEST_FINITE = 0x7F7FFFFF
WIDEST = 8  # single precision has 254 powers of two: 2**(bits-1) codes of bits - WIDEST of mantissa cover 128
HEADER_BYTES = 4
MANTISSA_FIELD = 5  # bits of the header
SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class Format:
    """A range of single-precision numbers with few bits of mantissa; or several ranges, by broadcasting.

    Truncated bit patterns of positive numbers are ordered like the numbers, so code c stands for pattern base + c - 1,
    and code 0 for zero.

    Attributes:
        bits: of a code, including the sign.
        shift: int32, number of truncated low bits: 23 - mantissa.
        base: int32, the truncated pattern of the smallest magnitude.
    """

    bits: int
    shift: Tensor
    base: Tensor

    @classmethod
    def ending_at(cls, largest: Tensor, bits: int, mantissa: Tensor) -> "Format":
        """Return the range that ends at ``largest``, a float32 magnitude."""
        shift = SINGLE_MANTISSA - mantissa
        last = (largest.view(torch.int32) + _half(shift)).clamp_max(LARGEST_FINITE) >> shift
        return cls(bits, shift, (last - (num_magnitudes(bits) - 1)).clamp_min(1))

    def codes(self, values: Tensor) -> Tensor:
        """Return the codes, 0 to ``num_magnitudes``, of the magnitudes of float32 ``values``, rounded to the nearest.

        Inside the range the relative error is at most 2**-(mantissa + 1). Below it a value becomes 0 or the smallest
        magnitude, whichever is nearer; above it, the largest.
        """
        patterns = values.view(torch.int32) & MAGNITUDE
        codes = ((patterns + _half(self.shift)) >> self.shift).sub_(self.base - 1)
        smallest = self.magnitudes(torch.ones_like(self.base))
        kept = patterns >= (smallest / 2).view(torch.int32)
        return codes.clamp_(1, num_magnitudes(self.bits)).mul_(kept)

    def magnitudes(self, codes: Tensor) -> Tensor:
        """Return the magnitudes of ``codes`` (int32), as float32 of the same shape."""
        return ((codes + (self.base - 1)).mul_(codes > 0) << self.shift).view(torch.float32)


def num_magnitudes(bits: int) -> int:
    """Return the number of magnitudes above zero of a code with ``bits`` bits, including the sign."""
    return (1 << (bits - 1)) - 1


def narrowest_mantissa(bits: int) -> int:
    """Return the fewest useful bits of mantissa: with fewer, codes would exceed single precision."""
    return max(0, bits - WIDEST)


def best_mantissa(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return the mantissa () int32 with the smallest relative error, measured on a sample of ``values``.

    Few bits of mantissa give a wide range of coarse values; many give a narrow range, and smaller values are lost.
    """
    sample = values[:: max(1, values.numel() // SAMPLE)]
    fewest = narrowest_mantissa(bits)
    mantissas = torch.arange(fewest, bits, dtype=torch.int32, device=values.device)[:, None]  # all candidates at once
    tried = Format.ending_at(largest, bits, mantissas)
    errors = tried.magnitudes(tried.codes(sample)) - sample.abs()
    squares = (errors / largest.clamp_min(torch.finfo(torch.float32).tiny)).square_()
    return blocks.sums(squares).argmin().to(torch.int32) + fewest


def _half(shift: Tensor) -> Tensor:
    """Return half of the last kept bit, as an integer of the truncated bits."""
    return torch.ones_like(shift) << (shift - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFloat(Codec):
    """Send values as floats of ``bits`` bits whose range ends at the largest magnitude of the message.

    With N bits and m of mantissa there are (2**(N-1) - 1) / 2**m powers of two in the range, and inside it the relative
    error is at most 2**-(m+1). Rounding is to the nearest, so the error is never larger than the values. Bytes: bits /
    8 for each value, and four for the message: where its range starts, and the mantissa.

    Args:
        bits: of a value, including the sign, 4 to 16.
        mantissa: its bits, from max(0, bits - 8) to bits - 1; None: those with the smallest error on a sample of the
            message.

    Raises:
        ValueError: bits or mantissa out of range.

    Source: the range-based float of Wang et al., FFT-based Gradient Sparsification, HPDC 2020, doi
    10.1145/3369583.3392681, arXiv 1811.08596. Differences: the smallest number follows in closed form from the largest;
    a range per message, not from the first steps; mantissa by measured error; the sign is the highest bit, with equally
    many codes for negative and positive numbers.
    """

    bits: int = 8
    mantissa: int | None = None
    name: ClassVar[str] = "range_float"

    def __post_init__(self) -> None:
        if not 4 <= self.bits <= 16:
            raise ValueError(f"bits of {self.name} must be in 4 to 16, got {self.bits}")
        fewest, most = narrowest_mantissa(self.bits), self.bits - 1
        if self.mantissa is not None and not fewest <= self.mantissa <= most:
            raise ValueError(
                f"mantissa of {self.name} must be in {fewest} to {most} for {self.bits} bits, got {self.mantissa}"
            )

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the bits of the values, in whole bytes, and four bytes for the range."""
        return HEADER_BYTES + num_packed_bytes(count, self.bits) if count else 0

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the range, then the codes."""
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        values = blocks.single(values)
        largest = torch.linalg.vector_norm(values, float("inf"))
        mantissa = self._mantissa(values, largest)
        form = Format.ending_at(largest, self.bits, mantissa)
        codes = form.codes(values)
        codes |= (values < 0).to(torch.int32) << (self.bits - 1)
        header = form.base << MANTISSA_FIELD | mantissa
        return torch.cat([to_bytes(header.view(1)), pack(codes, self.bits)])

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the decoded values."""
        if not count:
            return wire.new_empty(0, dtype=dtype)
        header = from_bytes(wire[:HEADER_BYTES], torch.int32)
        base, mantissa = header >> MANTISSA_FIELD, header & ((1 << MANTISSA_FIELD) - 1)
        codes = unpack(wire[HEADER_BYTES:], count, self.bits).to(torch.int32)
        form = Format(self.bits, SINGLE_MANTISSA - mantissa, base)
        return form.magnitudes(codes & num_magnitudes(self.bits)).mul_(1 - 2 * (codes >> (self.bits - 1))).to(dtype)

    def _mantissa(self, values: Tensor, largest: Tensor) -> Tensor:
        if self.mantissa is None:
            return best_mantissa(values, largest, self.bits)
        return torch.full_like(largest, self.mantissa, dtype=torch.int32)
