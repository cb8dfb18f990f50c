"""Random numbers that depend only on the parts of their seed: (seed, step[, rank])."""

import hashlib

import torch


def generator(*parts: int) -> torch.Generator:
    """Return a CPU generator seeded by a hash of ``parts``; the same parts give the same stream on every machine."""
    rng = torch.Generator()
    rng.manual_seed(_hashed(b"".join(map(_bytes_of, parts))))
    return rng


def seed_for(seed: int, name: str) -> int:
    """Return a seed derived from ``seed`` and ``name``; the same on every machine."""
    return _hashed(_bytes_of(seed) + name.encode())


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)


def _hashed(message: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1
