"""Pack small integers into bytes: m codes of b bits take ceil(m b / 8) bytes, lowest bits first.

On a CPU with numba `micro.kernels.packing` does it; the torch code here is its reference.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from micro import kernels
from micro.kernels.reference import places_of

BITS_OF_INT = 32  # int32, sign included


def num_packed_bytes(count: int, width: int) -> int:
    """Return the number of bytes of ``count`` codes of ``width`` bits."""
    return -(-count * width // 8)


def pack(codes: Tensor, width: int) -> Tensor:
    """Return ``codes`` (m,), integers in [0, 2**width), packed: (ceil(m * width / 8),) uint8.

    Raises:
        ValueError: width outside 1 to 32.
    """
    _check(width)
    loops = kernels.packing_on(codes.device)
    if loops is not None:
        packed = torch.empty(num_packed_bytes(codes.numel(), width), dtype=torch.uint8)
        loops.pack(codes, width, packed)
        return packed
    small = codes.to(torch.uint8 if width <= 8 else torch.int64)
    bits = (small[:, None] >> _places(width, small) & 1).view(-1).to(torch.uint8)
    rows = pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (rows << _places(8, rows)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Return the (count,) codes of ``width`` bits that ``pack`` packed: int32, and int64 with 32 bits."""
    _check(width)
    dtype, loops = torch.int64 if width == BITS_OF_INT else torch.int32, kernels.packing_on(packed.device)
    if loops is not None:
        codes = torch.empty(count, dtype=dtype)
        loops.unpack(packed, width, codes)
        return codes
    bits = unpack_bits(packed, count * width).view(count, width).to(dtype)
    return (bits << _places(width, bits)).sum(1, dtype=dtype)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Return the (count,) bits, uint8, that ``pack`` packed with a width of 1."""
    return (packed[:, None] >> _places(8, packed) & 1).view(-1)[:count]


def put_places(places: Tensor, low: int, gap: int, length: int) -> Tensor:
    """Pack ascending ``places`` (m,): their ``low`` low bits, then a bitmap (length,) with bits at high + gap * i."""
    count, loops = places.numel(), kernels.packing_on(places.device)
    if loops is not None:
        sizes = [num_packed_bytes(count, low), num_packed_bytes(length, 1)]
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        loops.put_places(places, low, gap, *packed.split(sizes))
        return packed
    flags = torch.zeros(length, dtype=torch.uint8, device=places.device)
    flags[(places >> low).to(torch.int64) + gap * torch.arange(count, device=places.device)] = 1
    highs = pack(flags, 1)
    return torch.cat([pack(places & ((1 << low) - 1), low), highs]) if low else highs


def get_places(packed: Tensor, count: int, low: int, gap: int, length: int) -> Tensor:
    """Return the ascending places (count,) int32 that ``put_places`` packed."""
    lows, highs = packed.split([num_packed_bytes(count, low), num_packed_bytes(length, 1)])
    loops = kernels.packing_on(packed.device)
    if loops is not None:
        places = torch.empty(count, dtype=torch.int32)
        loops.get_places(lows, highs, low, gap, places)
        return places
    found = places_of(unpack_bits(highs, length).bool(), count) - gap * torch.arange(count, device=packed.device)
    return (found << low | unpack(lows, count, low) if low else found).to(torch.int32)


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=like.dtype, device=like.device)


def _check(width: int) -> None:
    if not 1 <= width <= BITS_OF_INT:
        raise ValueError(f"width of a code must be in 1 to {BITS_OF_INT} bits, got {width}")
