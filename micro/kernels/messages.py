"""Compiled codes of a vector's parts, each a message of its own: all of them in one call.

``vectors`` are the values and the gradient, each as numbers and as bits, and the rest; `micro.kernels.casts` says what
becomes of them. ``lying`` are the bytes of the messages, the rows of `micro.codecs.messages` (n, 4), which part is left
out, and how many bytes those behind it begin earlier. Parts from ``first`` to ``last`` are visited. ``words`` (n, 2)
make the random numbers of each. Encoding returns the place in the vector of the first sum that is too large, or -1;
decoding fills ``out`` and returns the bit pattern of the largest magnitude.
"""

from typing import Any

import numpy as np

from micro.kernels import blockwise, casts, signs
from micro.kernels.jit import jitted

PLAIN, ONE = np.float32(0), np.float32(1)
WORD = 4  # bytes of a scale


@jitted
def _span(lying: Any, part: Any) -> Any:
    """Return where a part begins and ends, and where its message does; a part that is left out ends where it begins."""
    _, table, own, skip = lying
    shift = skip if part > own else 0
    stop = table[part, 0] if part == own else table[part, 1]
    return table[part, 0], stop, table[part, 2] - shift, table[part, 3] - shift


@jitted
def _given(vectors: Any, start: Any, stop: Any) -> Any:
    """Return what most codes take first, of a part."""
    values, bits, grad, grad_bits, rest = vectors
    return values[start:stop], bits[start:stop], grad[start:stop], grad_bits[start:stop], rest[start:stop], PLAIN


@jitted
def _first(bad: Any, start: Any, found: Any) -> Any:
    """Return ``bad``, the place of a bad sum, or -1; else that of the one that was ``found`` in a part."""
    return np.int64(start + found) if bad < 0 <= found else np.int64(bad)


@jitted
def _as_row(wire: Any, begin: Any, end: Any) -> Any:
    """Return a message as the only one of (1, bytes)."""
    return wire[begin:end].reshape((1, end - begin))


@jitted
def _no_values() -> Any:
    """Return the values that are added to what is decoded: none."""
    nothing = np.empty(0, np.float32)
    bits = nothing.view(np.int32)
    return nothing, bits, nothing, bits


@jitted
def encode_cast(vectors: Any, lying: Any, first: Any, last: Any, is_half: Any) -> Any:
    """Encode as codecs half and bfloat16 do."""
    bad = np.int64(-1)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            found = casts.encode_cast(*_given(vectors, start, stop), 0, lying[0][begin:end], is_half)
            bad = _first(bad, start, found)
    return bad


@jitted
def decode_cast(out: Any, lying: Any, first: Any, last: Any, is_half: Any) -> Any:
    """Decode what `encode_cast` made."""
    own, highest = _no_values(), np.int64(0)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            message = _as_row(lying[0], begin, end)
            highest = max(highest, casts.decode_cast(own, 0, message, out[start:stop], ONE, is_half))
    return highest


@jitted
def encode_int8(
    vectors: Any, lying: Any, first: Any, last: Any, words: Any, block: Any, group: Any, is_random: Any
) -> Any:
    """Encode as codec int8 does."""
    bad = np.int64(-1)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            codes = begin + WORD * _num_blocks(stop - start, block)
            places = lying[0][begin:codes], lying[0][codes:end]
            noise = is_random, words[part, 0], words[part, 1]
            found = blockwise.encode_int8(*_given(vectors, start, stop), 0, *places, block, group, *noise)
            bad = _first(bad, start, found)
    return bad


@jitted
def decode_int8(out: Any, lying: Any, first: Any, last: Any, block: Any, group: Any) -> Any:
    """Decode what `encode_int8` made."""
    own, highest = _no_values(), np.int64(0)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            message, skip = _as_row(lying[0], begin, end), WORD * _num_blocks(stop - start, block)
            found = blockwise.decode_int8(own, 0, message, out[start:stop], ONE, skip, block, group)
            highest = max(highest, found)
    return highest


@jitted
def encode_signs(vectors: Any, lying: Any, first: Any, last: Any, block: Any, group: Any) -> Any:
    """Encode as codec sign does."""
    bad = np.int64(-1)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            codes = begin + WORD * _num_blocks(stop - start, block)
            places = lying[0][begin:codes], lying[0][codes:codes], lying[0][codes:end]
            found = signs.encode_signs(*_given(vectors, start, stop), 0, *places, block, group, False)
            bad = _first(bad, start, found)
    return bad


@jitted
def decode_signs(out: Any, lying: Any, first: Any, last: Any, block: Any, group: Any) -> Any:
    """Decode what `encode_signs` made."""
    own, highest = _no_values(), np.int64(0)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            message, num_blocks = _as_row(lying[0], begin, end), _num_blocks(stop - start, block)
            found = signs.decode_signs(own, 0, message, out[start:stop], ONE, num_blocks, block, group, False)
            highest = max(highest, found)
    return highest


@jitted
def _num_blocks(count: Any, block: Any) -> Any:
    return (count + block - 1) // block
