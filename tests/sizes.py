"""Bytes of messages, counted independently of the code that counts them."""

import math
from collections.abc import Callable, Sequence

Size = Callable[[int], int]  # count -> bytes


def gathered(sizes: Sequence[float], rank: int) -> float:
    """A list of each rank to all others, filled up to the longest where that makes no more than 1.25 times as much."""
    n, longest = len(sizes), max(sizes)
    size = longest if n > 2 and n * longest <= 1.25 * sum(sizes) else sizes[rank]
    return (n - 1) * size


def coded(bits: float, *, block: int | None = None, header: int = 4) -> Size:
    """Bytes of codes of so many bits, and of a header for each block, or for the message."""

    def size(count: int) -> int:
        num_headers = math.ceil(count / block) if block else min(count, 1)
        return math.ceil(count * bits / 8) + header * num_headers

    return size


def ternary(count: int) -> int:
    """Bytes of five codes each, and four for every block."""
    return math.ceil(count / 5) + 4 * math.ceil(count / 1024)
