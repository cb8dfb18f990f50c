"""Indices at random."""

import random


def draw(count: int, span: int, seed: int = 0) -> list[int]:
    """Return ``count`` of ``span`` places, ascending."""
    return sorted(random.Random(seed).sample(range(span), count))
