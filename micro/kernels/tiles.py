"""Compiled operations on a tile, a part of a vector that fits in the first-level cache."""

from typing import Any

import numpy as np

from micro.kernels.jit import INFINITY_BITS, MAGNITUDE_BITS, as_bits, jitted

TILE = 1 << 12
STRIP = 1 << 9  # elements that each loop of the adding pass visits before the next one does, for the same reason
LIMIT_BITS = (127 + 100) << 23  # 2^100, see reference.limit
MANTISSA_BITS = (1 << 23) - 1
ORDINARY_BITS = (127 + 84) << 23  # 2^84, see reference.is_ordinary


@jitted
def highest_bits(bits: Any) -> Any:
    """Return the bit pattern of the largest magnitude, of NaN where there is one."""
    highest = np.int32(0)
    for i in range(bits.size):
        highest = max(highest, bits[i] & np.int32(MAGNITUDE_BITS))
    return np.int32(highest)


@jitted
def _drop_nonfinite(source: Any, source_bits: Any) -> Any:
    """Set what is NaN or infinite to zero; return its first place, or -1."""
    first_bad = -1
    for i in range(source.size):
        if source_bits[i] & INFINITY_BITS == INFINITY_BITS:
            first_bad = i if first_bad < 0 else first_bad
            source[i] = 0
    return first_bad


@jitted
def drop_too_large(target: Any, target_bits: Any, first_bad: Any) -> Any:
    """Set sums that are too large to zero; return their first place, or ``first_bad`` where that comes before."""
    for i in range(target.size):
        if target_bits[i] & MAGNITUDE_BITS >= LIMIT_BITS:
            first_bad = i if first_bad < 0 else min(first_bad, i)
            target[i] = 0
    return first_bad


@jitted
def absorb_tile(target: Any, target_bits: Any, source: Any, source_bits: Any) -> Any:
    """Add a tile's gradient to its residual; return the place of the first sum that is too large, or -1."""
    highest = highest_bits(source_bits)
    first_bad = _drop_nonfinite(source, source_bits) if highest >= INFINITY_BITS else -1
    for i in range(source.size):
        target[i] += source[i]
    return drop_too_large(target, target_bits, first_bad) if highest >= ORDINARY_BITS else first_bad


@jitted
def absorb_and_clear(target: Any, target_bits: Any, source: Any, source_bits: Any) -> Any:
    """Do the same with any number of tiles, and set the gradient to zero."""
    first_bad = -1
    for start in range(0, source.size, STRIP):
        end = min(start + STRIP, source.size)
        gradient = source[start:end]
        bad = absorb_tile(target[start:end], target_bits[start:end], gradient, source_bits[start:end])
        gradient[:] = 0
        first_bad = start + bad if first_bad < 0 <= bad else first_bad
    return first_bad


@jitted
def leave(rest: Any, values: Any, decoded: Any, weight: Any) -> Any:
    """Write into ``rest``, where there is one, what ``decoded`` lacks of ``values``.

    With a weight other than zero write that many times it, and ``decoded`` into ``values``.
    """
    if weight == 0:
        for i in range(rest.size):
            rest[i] = values[i] - decoded[i]
    else:
        for i in range(rest.size):
            rest[i] = weight * (values[i] - decoded[i])
        for i in range(values.size):
            values[i] = decoded[i]


@jitted
def divide(values: Any, divisor: Any) -> Any:
    """Divide the values, in place; return the bit pattern of the largest magnitude."""
    if divisor != 1 and as_bits(divisor) & np.int32(MANTISSA_BITS) == 0:  # a power of two: the same, and faster
        inverse = np.float32(np.float32(1) / divisor)
        for i in range(values.size):
            values[i] *= inverse
    elif divisor != 1:
        for i in range(values.size):
            values[i] /= divisor
    return highest_bits(values.view(np.int32))


@jitted
def finish(total: Any, values: Any, divisor: Any, is_empty: Any) -> Any:
    """Add the values, where there are any, to the sum of messages, or of none; divide it as `divide` does."""
    if is_empty:
        for i in range(values.size):
            total[i] = values[i]
    else:
        for i in range(values.size):
            total[i] += values[i]
    return divide(total, divisor)
