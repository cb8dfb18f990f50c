"""Who searches which part of the vector."""


def equal_slice(numel: int, world_size: int, part: int) -> tuple[int, int]:
    """Return (start, stop) of one of ``world_size`` slices; the first ``numel % world_size`` are one longer."""
    size, longer = divmod(numel, world_size)
    start = part * size + min(part, longer)
    return start, start + size + (part < longer)


def equal_sizes(numel: int, world_size: int) -> list[int]:
    """Return the lengths of the ``world_size`` equal slices."""
    return [stop - start for start, stop in (equal_slice(numel, world_size, part) for part in range(world_size))]


def cyclic_slice(numel: int, step: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the slice that ``rank`` searches at ``step``: each rank visits every slice once in ``world_size`` steps.

    Source: Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967 (partition (step + rank) mod world_size).
    """
    return equal_slice(numel, world_size, (step + rank) % world_size)
