"""Packing of small whole numbers: m codes of b bits take ceil(m b / 8) bytes, the lowest bits first."""

import torch
from torch import Tensor

from micro import kernels
from micro.kernels.reference import places_of

GROUP = 8  # codes that fill whole bytes together, whatever their width
WORD = 8  # bytes of an int64
BITS_OF_INT = 32  # of an int32, sign included


def num_packed_bytes(count: int, width: int) -> int:
    """Return the bytes that ``count`` codes of ``width`` bits take."""
    return -(-count * width // 8)


def pack(codes: Tensor, width: int) -> Tensor:
    """Return ``codes`` (m,), whole numbers in [0, 2**width), side by side: (ceil(m * width / 8),) uint8.

    Raises:
        ValueError: width outside 1 to 32.
    """
    _check(width)
    loops = kernels.packing_on(codes.device)
    if loops is not None:
        packed = torch.empty(num_packed_bytes(codes.numel(), width), dtype=torch.uint8)
        loops.pack(codes, width, packed)
        return packed
    return _pack_in_torch(codes, width)


def _pack_in_torch(codes: Tensor, width: int) -> Tensor:
    count = codes.numel()
    if 8 % width == 0:
        return _pack_in_bytes(codes, width)
    groups = torch.zeros(-(-count // GROUP), GROUP, dtype=torch.int64, device=codes.device)
    groups.view(-1)[:count] = codes
    if width < 8:  # eight codes fit into one word
        shifts = torch.arange(GROUP, device=codes.device) * width
        filled = (groups << shifts).sum(1).view(torch.uint8).view(-1, WORD)[:, :width]
    else:
        filled = torch.stack([_byte_of_group(groups, place, width) for place in range(width)], 1)
    return filled.reshape(-1)[: num_packed_bytes(count, width)].to(torch.uint8)


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Return the (count,) codes of ``width`` bits that ``pack`` packed: int32, and int64 with 32 bits."""
    _check(width)
    dtype, loops = torch.int64 if width == BITS_OF_INT else torch.int32, kernels.packing_on(packed.device)
    if loops is not None:
        codes = torch.empty(count, dtype=dtype)
        loops.unpack(packed, width, codes)
        return codes
    return _unpack_in_torch(packed, count, width).to(dtype)


def _unpack_in_torch(packed: Tensor, count: int, width: int) -> Tensor:
    if 8 % width == 0:
        return _unpack_from_bytes(packed, width)[:count].to(torch.int64)
    num_groups = -(-count // GROUP)
    rows = torch.zeros(num_groups * width, dtype=torch.uint8, device=packed.device)
    rows[: packed.numel()] = packed
    rows = rows.view(num_groups, width)
    if width < 8:
        words = torch.zeros(num_groups, WORD, dtype=torch.uint8, device=packed.device)
        words[:, :width] = rows
        shifts = torch.arange(GROUP, device=packed.device) * width
        codes = words.view(torch.int64) >> shifts & ((1 << width) - 1)
    else:
        codes = torch.stack([_code_of_group(rows, place, width) for place in range(GROUP)], 1)
    return codes.reshape(-1)[:count]


def put_places(places: Tensor, low: int, gap: int, length: int) -> Tensor:
    """Return the ``low`` low bits of ascending ``places`` (m,), then ``length`` bits: set at every high + gap * i."""
    count, loops = places.numel(), kernels.packing_on(places.device)
    if loops is not None:
        packed = torch.empty(num_packed_bytes(count, low) + num_packed_bytes(length, 1), dtype=torch.uint8)
        loops.put_places(places, low, gap, *packed.split([num_packed_bytes(count, low), num_packed_bytes(length, 1)]))
        return packed
    flags = torch.zeros(length, dtype=torch.uint8, device=places.device)
    flags[(places >> low).to(torch.int64) + gap * torch.arange(count, device=places.device)] = 1
    highs = pack(flags, 1)
    return torch.cat([pack(places & ((1 << low) - 1), low), highs]) if low else highs


def get_places(packed: Tensor, count: int, low: int, gap: int, length: int) -> Tensor:
    """Return the ascending places (count,) int32 that ``put_places`` put down."""
    lows, highs = packed.split([num_packed_bytes(count, low), num_packed_bytes(length, 1)])
    loops = kernels.packing_on(packed.device)
    if loops is not None:
        places = torch.empty(count, dtype=torch.int32)
        loops.get_places(lows, highs, low, gap, places)
        return places
    found = places_of(unpack_bits(highs, length).bool(), count) - gap * torch.arange(count, device=packed.device)
    return (found << low | unpack(lows, count, low) if low else found).to(torch.int32)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Return the (count,) bits, uint8, that ``pack`` packed with a width of 1."""
    return _unpack_from_bytes(packed, 1)[:count]


def _pack_in_bytes(codes: Tensor, width: int) -> Tensor:
    """Pack codes of which a whole number fits into a byte: one pass over uint8."""
    per_byte = 8 // width
    small = codes.to(torch.uint8)
    if per_byte == 1:
        return small
    if small.numel() % per_byte:
        small = torch.cat([small, small.new_zeros(-small.numel() % per_byte)])
    columns = small.view(-1, per_byte).unbind(1)
    packed = columns[0].clone()
    for place in range(1, per_byte):
        packed |= columns[place] << (place * width)
    return packed


def _unpack_from_bytes(packed: Tensor, width: int) -> Tensor:
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & ((1 << width) - 1)).view(-1)


def _byte_of_group(groups: Tensor, place: int, width: int) -> Tensor:
    """Return byte ``place`` of every group: it holds parts of at most two codes, as these have eight bits or more."""
    first, into = divmod(8 * place, width)
    byte = groups[:, first] >> into
    if width - into < 8:
        byte = byte | groups[:, first + 1] << (width - into)
    return byte & 0xFF


def _code_of_group(rows: Tensor, place: int, width: int) -> Tensor:
    """Return code ``place`` of every group, put together from the bytes that hold a part of it."""
    first, into = divmod(place * width, 8)
    last = ((place + 1) * width - 1) // 8
    code = rows[:, first].to(torch.int64) >> into
    for byte in range(first + 1, last + 1):
        code = code | rows[:, byte].to(torch.int64) << (8 * (byte - first) - into)
    return code & ((1 << width) - 1)


def _check(width: int) -> None:
    if not 1 <= width <= 32:
        raise ValueError(f"width of a code must be in 1 to 32 bits, got {width}")
