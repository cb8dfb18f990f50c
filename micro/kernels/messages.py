"""Compiled codes of a vector's parts, each a message of its own: all of them in one call.

``vectors`` are the values and the gradient, each as numbers and as bits, and the rest; `micro.kernels.casts` says what
becomes of them. ``lying`` are the bytes of the messages, the rows of `micro.codecs.messages` (n, 4), which part is left
out, and how many bytes those behind it begin earlier. Parts from ``first`` to ``last`` are visited. ``words`` (n, 2)
make the random numbers of each. Encoding returns the place in the vector of the first sum that is too large, or -1;
decoding fills ``out`` and returns the bit pattern of the largest magnitude.
"""

from typing import Any

import numpy as np

from micro.kernels import blockwise, casts, ranges, signs
from micro.kernels.jit import get32, jitted, put32

PLAIN, ONE = np.float32(0), np.float32(1)
WORD = 4  # bytes of a scale, and of what is ahead of a message's codes


@jitted
def _span(lying: Any, part: Any) -> Any:
    """Return where a part begins and ends, and where its message does; a part that is left out ends where it begins."""
    _, table, own, skip = lying
    shift = skip if part > own else 0
    stop = table[part, 0] if part == own else table[part, 1]
    return table[part, 0], stop, table[part, 2] - shift, table[part, 3] - shift


@jitted
def _summands(vectors: Any, start: Any, stop: Any) -> Any:
    """Return the values and the gradient of a part, each as numbers and as bits."""
    values, bits, grad, grad_bits, _ = vectors
    return values[start:stop], bits[start:stop], grad[start:stop], grad_bits[start:stop]


@jitted
def _given(vectors: Any, start: Any, stop: Any) -> Any:
    """Return what most codes take first, of a part."""
    values, bits, grad, grad_bits, rest = vectors
    return values[start:stop], bits[start:stop], grad[start:stop], grad_bits[start:stop], rest[start:stop], PLAIN


@jitted
def _settled(vectors: Any, start: Any, stop: Any) -> Any:
    """Return what codes take first, of a part to which the gradient was added."""
    values, bits, _, _, rest = vectors
    return values[start:stop], bits[start:stop], rest[start:stop], PLAIN


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
            found = casts.encode_cast(*_given(vectors, start, stop), lying[0][begin:end], is_half)
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
            highest = max(highest, casts.decode_cast(own, message, out[start:stop], ONE, is_half, 0))
    return highest


@jitted
def encode_natural(vectors: Any, lying: Any, first: Any, last: Any, words: Any, is_random: Any) -> Any:
    """Encode as codec natural does."""
    bad = np.int64(-1)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            noise = is_random, words[part, 0], words[part, 1]
            found, highest = casts.highest_power(*_summands(vectors, start, stop), *noise, 0)
            below = np.int32(max(np.int32(highest) - np.int32(casts.NUM_POWERS), np.int32(0)))
            put32(lying[0][begin:end], 0, np.uint64(np.uint32(below)))
            casts.encode_natural(*_settled(vectors, start, stop), lying[0][begin + WORD : end], below, *noise, 0)
            bad = _first(bad, start, found)
    return bad


@jitted
def decode_natural(out: Any, lying: Any, first: Any, last: Any) -> Any:
    """Decode what `encode_natural` made."""
    own, highest, belows = _no_values(), np.int64(0), np.empty(1, np.int32)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            message = _as_row(lying[0], begin, end)
            belows[0] = np.int32(get32(message[0], 0))
            highest = max(highest, casts.decode_natural(own, belows, message, WORD, out[start:stop], ONE))
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
            places = lying[0][begin:codes], lying[0][codes:end].view(np.int8)
            noise = is_random, words[part, 0], words[part, 1]
            found = blockwise.encode_int8(*_given(vectors, start, stop), *places, block, group, 0, *noise)
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
            found = blockwise.decode_int8(own, message, skip, out[start:stop], ONE, block, group, 0)
            highest = max(highest, found)
    return highest


@jitted
def encode_levels(
    vectors: Any,
    lying: Any,
    first: Any,
    last: Any,
    words: Any,
    block: Any,
    group: Any,
    bits: Any,
    is_least_squares: Any,
) -> Any:
    """Encode as codec qsgd does."""
    bad = np.int64(-1)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            codes = begin + WORD * _num_blocks(stop - start, block)
            places = lying[0][begin:codes], lying[0][codes:end]
            how = block, group, 0, bits, is_least_squares, words[part, 0], words[part, 1]
            found = blockwise.encode_levels(*_given(vectors, start, stop), *places, *how)
            bad = _first(bad, start, found)
    return bad


@jitted
def decode_levels(out: Any, lying: Any, first: Any, last: Any, block: Any, group: Any, bits: Any) -> Any:
    """Decode what `encode_levels` made."""
    own, highest, lowest = _no_values(), np.int64(0), np.int32(1 - (1 << (bits - 1)))
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            message, skip = _as_row(lying[0], begin, end), WORD * _num_blocks(stop - start, block)
            found = blockwise.decode_levels(own, message, skip, out[start:stop], ONE, block, group, 0, bits, lowest)
            highest = max(highest, found)
    return highest


@jitted
def encode_ternary(
    vectors: Any,
    lying: Any,
    first: Any,
    last: Any,
    words: Any,
    block: Any,
    group: Any,
    clip: Any,
    is_least_squares: Any,
) -> Any:
    """Encode as codec terngrad does."""
    bad = np.int64(-1)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            codes = begin + WORD * _num_blocks(stop - start, block)
            places = lying[0][begin:codes], lying[0][codes:end]
            how = block, group, 0, clip, is_least_squares, words[part, 0], words[part, 1]
            found = blockwise.encode_ternary(*_given(vectors, start, stop), *places, *how)
            bad = _first(bad, start, found)
    return bad


@jitted
def decode_ternary(out: Any, lying: Any, first: Any, last: Any, block: Any, group: Any) -> Any:
    """Decode what `encode_ternary` made."""
    own, highest = _no_values(), np.int64(0)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            message, skip = _as_row(lying[0], begin, end), WORD * _num_blocks(stop - start, block)
            found = blockwise.decode_ternary(own, message, skip, out[start:stop], ONE, block, group, 0)
            highest = max(highest, found)
    return highest


@jitted
def encode_signs(vectors: Any, lying: Any, first: Any, last: Any, block: Any, group: Any, has_two: Any) -> Any:
    """Encode as codecs sign and onebit do."""
    bad = np.int64(-1)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            lowers = begin + WORD * _num_blocks(stop - start, block)
            codes = lowers + (lowers - begin if has_two else 0)
            places = lying[0][begin:lowers], lying[0][lowers:codes], lying[0][codes:end]
            found = signs.encode_signs(*_given(vectors, start, stop), *places, block, group, has_two)
            bad = _first(bad, start, found)
    return bad


@jitted
def decode_signs(out: Any, lying: Any, first: Any, last: Any, block: Any, group: Any, has_two: Any) -> Any:
    """Decode what `encode_signs` made."""
    own, highest = _no_values(), np.int64(0)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            message, num_blocks = _as_row(lying[0], begin, end), _num_blocks(stop - start, block)
            found = signs.decode_signs(own, message, num_blocks, out[start:stop], ONE, block, group, 0, has_two)
            highest = max(highest, found)
    return highest


@jitted
def encode_range_float(vectors: Any, lying: Any, first: Any, last: Any, width: Any, mantissa: Any, fewest: Any) -> Any:
    """Encode as codec range_float does; with a ``mantissa`` of -1 each message has its best."""
    bad, best = np.int64(-1), np.int32(mantissa)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            found, highest = ranges.look(*_summands(vectors, start, stop))
            largest = np.int32(highest)
            if mantissa < 0:
                best = np.int32(ranges.best_mantissa(_sample(vectors[0][start:stop]), largest, width, fewest))
            base = np.int32(ranges.base_of(largest, width, best))
            put32(lying[0][begin:end], 0, np.uint64(np.uint32(base << np.int32(5) | best)))
            ranges.encode(*_settled(vectors, start, stop), lying[0][begin + WORD : end], width, base, best)
            bad = _first(bad, start, found)
    return bad


@jitted
def decode_range_float(out: Any, lying: Any, first: Any, last: Any, width: Any) -> Any:
    """Decode what `encode_range_float` made."""
    own, highest = _no_values(), np.int64(0)
    bases, mantissas = np.empty(1, np.int32), np.empty(1, np.int32)
    for part in range(first, last):
        start, stop, begin, end = _span(lying, part)
        if start < stop:
            message = _as_row(lying[0], begin, end)
            header = np.int32(get32(message[0], 0))
            bases[0], mantissas[0] = header >> np.int32(5), header & np.int32(31)
            found = ranges.decode(own, bases, mantissas, message, out[start:stop], ONE, width, 0)
            highest = max(highest, found)
    return highest


@jitted
def _num_blocks(count: Any, block: Any) -> Any:
    return (count + block - 1) // block


@jitted
def _sample(values: Any) -> Any:
    """Return about `ranges.SAMPLE` of the values, evenly spread."""
    stride = max(1, values.size // ranges.SAMPLE)
    sample = np.empty((values.size + stride - 1) // stride, np.float32)
    for i in range(sample.size):
        sample[i] = values[i * stride]
    return sample
