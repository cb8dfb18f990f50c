"""Random numbers that depend only on what they are asked for: (seed, step[, rank])."""

import hashlib

import torch


def generator(*parts: int) -> torch.Generator:
    """Return a CPU generator seeded by a hash of ``parts``; the same parts give the same stream on every machine."""
    made = torch.Generator()
    made.manual_seed(_hashed(b"".join(map(_bytes_of, parts))))
    return made


def seed_for(seed: int, name: str) -> int:
    """Return a seed of its own for what goes by ``name``; the same on every machine."""
    return _hashed(_bytes_of(seed) + name.encode())


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)


def _hashed(message: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1
