"""Compiled sums in the order of `micro.codecs.blocks.sums`: the upper half is added to the lower until one is left."""

from typing import Any

import numpy as np

from micro.kernels.jit import jitted

TINY = np.float32(2.0**-126)


@jitted
def total(terms: Any) -> Any:
    """Return the sum of the terms, which are used up."""
    count = terms.size
    while count > 1:
        half = 1
        while 2 * half < count:
            half *= 2
        low, high = terms[: count - half], terms[half:count]
        for i in range(low.size):
            low[i] += high[i]
        count = half
    return np.float32(terms[0])


@jitted
def sum_of_products(x: Any, y: Any, terms: Any) -> Any:
    """Return the sum of ``x`` times ``y``; ``terms`` is memory for as many."""
    for i in range(x.size):
        terms[i] = x[i] * y[i]
    return total(terms)


@jitted
def factor(shares: Any, levels: Any, terms: Any) -> Any:
    """Return <shares, levels> / <levels, levels>, or 0; see micro.codecs.blocks.least_squares."""
    inner, squares = sum_of_products(shares, levels, terms), sum_of_products(levels, levels, terms)
    return np.float32(inner / (squares if squares > TINY else TINY))
