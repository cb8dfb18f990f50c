"""Compiled sums in the order of `micro.codecs.blocks.sums`: the upper half is added to the lower until one is left."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from micro.kernels.jit import jitted

LANES = 16
NEAR = 128  # terms that are added up in registers
TINY = np.float32(2.0**-126)


def _sum_of_near(typingctx: Any, terms: Any) -> Any:
    """Return the sum of the first NEAR terms of a float32 vector."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = ir.VectorType(ir.FloatType(), LANES)
        source = context.make_array(sig.args[0])(context, builder, args[0])
        base = builder.bitcast(source.data, lanes.as_pointer())
        parts = []
        for i in range(NEAR // LANES):
            loaded = builder.load(builder.gep(base, [ir.Constant(ir.IntType(64), i)]))
            loaded.align = 4
            parts.append(loaded)
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [builder.fadd(low, high) for low, high in zip(parts[:half], parts[half:], strict=True)]
        return folded(builder, parts[0])

    return types.float32(terms), codegen


def folded(builder: Any, vector: Any) -> Any:
    """Return the sum of the lanes of a vector."""
    size, lane = vector.type.count, ir.IntType(32)
    if size == 1:
        return builder.extract_element(vector, ir.Constant(lane, 0))
    half = ir.VectorType(lane, size // 2)
    empty = ir.Constant(vector.type, ir.Undefined)
    low = builder.shuffle_vector(vector, empty, ir.Constant(half, list(range(size // 2))))
    high = builder.shuffle_vector(vector, empty, ir.Constant(half, list(range(size // 2, size))))
    return folded(builder, builder.fadd(low, high))


_near: Any = intrinsic(_sum_of_near)


@jitted
def _halved(terms: Any, half: Any) -> Any:
    """Return the sum of the first ``half`` terms, a power of two; they are used up."""
    while half > NEAR:
        half //= 2
        low, high = terms[:half], terms[half : 2 * half]
        for i in range(half):
            low[i] += high[i]
    if half == NEAR:
        return np.float32(_near(terms))
    while half > 1:
        half //= 2
        for i in range(half):
            terms[i] += terms[half + i]
    return np.float32(terms[0])


@jitted
def total(terms: Any) -> Any:
    """Return the sum of the terms, which are used up."""
    count = terms.size
    half = 1
    while 2 * half < count:
        half *= 2
    if count > 1:
        low, high = terms[: count - half], terms[half:]
        for i in range(count - half):
            low[i] += high[i]
    return _halved(terms, half)


@jitted
def sum_of_products(x: Any, y: Any, terms: Any) -> Any:
    """Return the sum of ``x`` times ``y``; ``terms`` is memory for as many."""
    quarter = x.size // 4
    if quarter < NEAR or x.size & (x.size - 1):
        for i in range(x.size):
            terms[i] = x[i] * y[i]
        return total(terms)
    a, b, c, d = x[:quarter], x[quarter : 2 * quarter], x[2 * quarter : 3 * quarter], x[3 * quarter :]
    e, f, g, h = y[:quarter], y[quarter : 2 * quarter], y[2 * quarter : 3 * quarter], y[3 * quarter :]
    for i in range(quarter):  # both halvings of `total` at once
        terms[i] = (a[i] * e[i] + c[i] * g[i]) + (b[i] * f[i] + d[i] * h[i])
    return _halved(terms, quarter)


@jitted
def factor(shares: Any, levels: Any, terms: Any) -> Any:
    """Return <shares, levels> / <levels, levels>, or 0; see micro.codecs.blocks.least_squares."""
    inner, squares = sum_of_products(shares, levels, terms), sum_of_products(levels, levels, terms)
    return np.float32(inner / (squares if squares > TINY else TINY))
