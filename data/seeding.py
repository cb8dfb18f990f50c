"""Random generators that are seeded by a tuple of integers."""

import hashlib
import operator

import torch


def mix(*parts: int) -> int:
    """Return the 64-bit seed of a tuple of integers, the same on every machine and in every version.

    The seed is the first eight bytes, little-endian, of blake2b over the parts in decimal, joined by commas. Unlike a
    sum, it keeps ``(seed, epoch) = (1, 2)`` apart from ``(2, 1)`` and from ``(1, 2, 0)``.
    """
    text = ",".join(str(operator.index(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*parts: int) -> torch.Generator:
    """Return a new generator on the CPU seeded by ``mix(*parts)``, such as ``generator(seed, epoch, rank)``.

    Drawing on the CPU keeps a run's batches the same on every device. Torch's CPU generator uses 32 bits of the seed.
    """
    return torch.Generator().manual_seed(mix(*parts))
