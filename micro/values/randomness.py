"""Random numbers that depend only on the parts of their seed: (seed, step[, rank])."""

import hashlib
from operator import index

import torch
from torch import Tensor


def generator(*parts: int) -> torch.Generator:
    """Return a CPU generator seeded by a hash of ``parts``; the same parts give the same stream on every machine."""
    rng = torch.Generator()
    rng.manual_seed(_hashed(b"".join(map(_bytes_of, parts))))
    return rng


def words(*parts: int) -> tuple[int, int]:
    """Return two words of 32 bits, which make the random numbers of `bits`, from a hash of ``parts``."""
    hashed = hashlib.blake2b(b"".join(map(_bytes_of, parts)), digest_size=8).digest()
    return int.from_bytes(hashed[:4], "little"), int.from_bytes(hashed[4:], "little")


def bits(words: tuple[int, int], count: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each place (count,) int32: the same on every device.

    They are counted, not drawn: the bits of a place follow from it and from the two words by two multiplications.
    That is enough for rounding, not for cryptography or for long simulations: in four million of them tests of evenness
    and of correlation see slight faults. Two pairs of words whose first words are equal, and whose second ones differ
    by little, give bits that are correlated; those of `words` are digests, so that such pairs are improbable.

    Source: the integer hash "lowbias32" of Wellons, which was found by a search for the least bias. Differences: one
    word joins the place before it, the other between its two rounds.
    """
    first, second = (_signed(word) for word in words)
    word = torch.arange(count, dtype=torch.int32, device=device).bitwise_xor_(first)
    word ^= _shifted(word, 16)
    word *= 0x7FEB352D  # products wrap
    word ^= _shifted(word, 15)
    word ^= second
    word *= _signed(0x846CA68B)
    word ^= _shifted(word, 16)
    return word


def uniform(words: tuple[int, int], count: int, device: torch.device) -> Tensor:
    """Return a random multiple of 2^-24 in [0, 1) for each place (count,) float32, made of `bits`."""
    return _shifted(bits(words, count, device), 8).to(torch.float32).mul_(2.0**-24)


def _shifted(word: Tensor, places: int) -> Tensor:
    """Return int32 ``word`` shifted to the right, filled with zeros."""
    return (word >> places) & ((1 << (32 - places)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def seed_for(seed: int, name: str) -> int:
    """Return a seed derived from ``seed`` and ``name``; the same on every machine."""
    return _hashed(_bytes_of(seed) + name.encode())


def _bytes_of(number: int) -> bytes:
    return (index(number) % 2**64).to_bytes(8, "little")  # of a negative number its two's complement


def _hashed(message: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1
