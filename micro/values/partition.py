"""Slices of a vector, and which rank searches which."""

from functools import lru_cache


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
