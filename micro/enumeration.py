"""Which of a line's places are set, given how many: a code as long as the logarithm of the number of possible sets.

Each place in turn narrows an interval by what is known: of the places that are left, so many are set. The widths of
all sets are equal then, so that the length of the code follows from the number of places alone, and receivers know it.

Source: Cover, Enumerative Source Encoding, IEEE Transactions on Information Theory 1973; with the interval of
Rissanen & Langdon, IBM Journal of Research and Development 1979, in 64 bits in place of exact binomials.
"""

import math
from decimal import Decimal, localcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from micro import kernels

WORD = 16  # bits that are written together
LEAST, WHOLE = 1 << 48, (1 << 64) - 1
EXACT = 256  # factorials up to here are numbers, above them Stirling's series
DIGITS = 40


@lru_cache(maxsize=4096)
def num_words(count: int, length: int) -> int:
    """Return how many words of 16 bits ``count`` places of ``length`` take: the same on every machine.

    It is one more than whole words hold of the logarithm, so that less than 16 bits are lost. Rounding of the interval
    adds at most 1.45 length / 2^48 bits for each place.
    """
    if count in (0, length):
        return 0
    with localcontext() as context:
        context.prec = DIGITS
        bits = (_log_factorial(length) - _log_factorial(count) - _log_factorial(length - count)) / _log_two()
        bits += Decimal(count) * length / 2**47 + Decimal("1e-6")
        return int(bits) // WORD + 1


def encode(places: Tensor, length: int) -> Tensor:
    """Return ascending ``places`` (count,) of a line of ``length`` as (2 num_words,) uint8, on a CPU."""
    words = torch.zeros(num_words(places.numel(), length), dtype=torch.uint16)
    if words.numel():
        positions = places.to(torch.int64).contiguous().numpy()
        loops = kernels.enumerating_on(places.device)
        loops.encode(positions, length, words.numpy()) if loops else _encode(positions, length, words.numpy())
    return words.view(torch.uint8)


def decode(wire: Tensor, count: int, length: int) -> Tensor:
    """Return the (count,) int64 places that ``encode`` was given."""
    if count == length:
        return torch.arange(count)
    places = torch.empty(count, dtype=torch.int64)
    if count:
        words = wire.clone(memory_format=torch.contiguous_format).view(torch.uint16).numpy()
        loops = kernels.enumerating_on(wire.device)
        loops.decode(words, length, places.numpy()) if loops else _decode(words, length, places.numpy())
    return places


def _encode(places: Any, length: int, words: Any) -> None:
    """Do what the compiled loop does, in whole numbers of any size: ``low`` is all that was written."""
    low, width, written = 0, WHOLE, 0
    done, count = 0, len(places)
    for i in range(length):
        rest, left = length - i, count - done
        if left in (0, rest):
            break
        set_width = width // rest * left
        if places[done] == i:
            width, done = set_width, done + 1
        else:
            low, width = low + set_width, width - set_width
        while width < LEAST:
            low, width, written = low << WORD, width << WORD, written + 1
    number = (low + LEAST - 1) >> 48  # of written + 1 words
    words[: written + 1] = [number >> WORD * later & 0xFFFF for later in reversed(range(written + 1))]


def _decode(words: Any, length: int, places: Any) -> None:
    """Do what the compiled loop does."""
    given = iter(words.tolist())
    value, width = 0, WHOLE
    for _ in range(4):
        value = value << WORD | next(given, 0)
    done, count = 0, len(places)
    for i in range(length):
        rest, left = length - i, count - done
        if left == 0:
            return
        if left == rest:
            places[done:] = range(i, length)
            return
        set_width = width // rest * left
        if value < set_width:
            places[done] = i
            width, done = set_width, done + 1
        else:
            value, width = value - set_width, width - set_width
        while width < LEAST:
            value, width = value << WORD | next(given, 0), width << WORD


def _log_factorial(n: int) -> Decimal:
    """Return the natural logarithm of n!, to more than 20 digits."""
    if n <= EXACT:
        return Decimal(math.factorial(n)).ln()
    x = Decimal(n)
    series = 1 / (12 * x) - 1 / (360 * x**3) + 1 / (1260 * x**5) - 1 / (1680 * x**7)
    return (x + Decimal("0.5")) * x.ln() - x + _log_two_pi() / 2 + series


@cache
def _log_two() -> Decimal:
    with localcontext() as context:
        context.prec = DIGITS
        return Decimal(2).ln()


@cache
def _log_two_pi() -> Decimal:
    with localcontext() as context:
        context.prec = DIGITS
        return Decimal("6.283185307179586476925286766559005768394").ln()
