"""Who searches which part of the vector."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise


def equal_slice(numel: int, world_size: int, part: int) -> tuple[int, int]:
    """Return (start, stop) of one of ``world_size`` slices; the first ``numel % world_size`` are one longer."""
    size, longer = divmod(numel, world_size)
    start = part * size + min(part, longer)
    return start, start + size + (part < longer)


def equal_sizes(numel: int, world_size: int) -> list[int]:
    """Return the lengths of the ``world_size`` equal slices."""
    return [stop - start for start, stop in equal_slices(numel, world_size)]


@lru_cache(maxsize=256)  # called at every step
def equal_slices(numel: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of all ``world_size`` equal slices in turn."""
    return tuple(equal_slice(numel, world_size, part) for part in range(world_size))


def cyclic_slices(numel: int, step: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """Return the `cyclic_slice` of every rank, in rank order."""
    return cyclic(equal_slices(numel, world_size), step)


def cyclic(parts: tuple[tuple[int, int], ...], step: int) -> tuple[tuple[int, int], ...]:
    """Return the part of every rank at ``step``, in rank order: each rank has every part once in as many steps."""
    first = step % len(parts)
    return parts[first:] + parts[:first]


def cyclic_slice(numel: int, step: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the slice that ``rank`` searches at ``step``: each rank visits every slice once in ``world_size`` steps.

    Source: Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967 (partition (step + rank) mod world_size).
    """
    return equal_slice(numel, world_size, (step + rank) % world_size)


def block_spans(blocks: Sequence[int], block_size: int, numel: int) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive partitions of so many blocks each; together they cover [0, numel).

    The last partition ends at ``numel``, whatever the length of its blocks.
    """
    edges = [min(block_size * place, numel) for place in accumulate(blocks, initial=0)]
    edges[-1] = numel
    return list(pairwise(edges))


@lru_cache(maxsize=64)  # called at every step
def layer_pieces(numels: tuple[int, ...], world_size: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of every layer; one longer than its fair share is cut into ``world_size`` equal slices.

    Layers and slices without elements are left out.

    Source: Yoon and Oh, DEFT, ICPP 2023, arXiv 2307.03500 (a share is sum(numels) / world_size).
    """
    numel, first, pieces = sum(numels), 0, []
    for size in numels:
        parts = world_size if size * world_size > numel else 1
        pieces += [(first + start, first + stop) for start, stop in (equal_slice(size, parts, p) for p in range(parts))]
        first += size
    return tuple((start, stop) for start, stop in pieces if stop > start)


@lru_cache(maxsize=64)  # called at every step
def layer_piece_sizes(numels: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """Return the lengths of the `layer_pieces`."""
    return tuple(stop - start for start, stop in layer_pieces(numels, world_size))
