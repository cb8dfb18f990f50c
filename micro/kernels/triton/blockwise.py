"""What the codes of blocks share: tiles of whole blocks, their scales, random numbers, packing.

Sums are made in the order of `micro.codecs.blocks.sums`, and quotients and roots are rounded correctly, so that scales
and codes are the bits that torch and the compiled loops give on a CPU.
"""

import triton.language as tl

from micro.kernels.triton.launching import kernel

TILE = 2048  # values of a program
SMALLEST_BLOCK = 16


def serves(block: int) -> bool:
    """Tell whether the kernels can code blocks of ``block`` values: a power of 2, neither short nor beyond a tile."""
    return block & (block - 1) == 0 and SMALLEST_BLOCK <= block <= TILE


def rows_of_tile(block: int) -> int:
    """Return how many blocks a program takes."""
    return TILE // block


def num_tiles(numel: int, block: int) -> int:
    """Return the programs for ``numel`` values: for all whole blocks, and one for the short block at the end."""
    return -(-(numel // block) // rows_of_tile(block)) + 1


@kernel
def each_tile(
    numel: tl.tensor,
    BODY: tl.constexpr,
    arguments: tl.tuple,
    CONSTANTS: tl.tuple,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Call ``BODY(arguments, CONSTANTS, rows, end, ROWS, BLOCK)`` with the blocks (ROWS,) of this program.

    Their values stop before ``end``. See `launching.each_block` for the constants.
    """
    whole = numel // BLOCK
    lanes = tl.arange(0, ROWS)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        BODY(arguments, CONSTANTS, tl.program_id(0) * ROWS + lanes, whole * BLOCK, ROWS, BLOCK)
    else:
        BODY(arguments, CONSTANTS, whole + lanes, numel, ROWS, BLOCK)


@kernel
def offsets_of(rows: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the places (ROWS, BLOCK) of the values of blocks."""
    return tl.expand_dims(rows * BLOCK, 1) + tl.expand_dims(tl.arange(0, BLOCK), 0)


@kernel
def noise(places: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Return the 32 random bits (uint32) of int32 ``places``; the words are int32 with the same bits."""
    one = tl.cast(first, tl.int32).to(tl.uint32, bitcast=True)
    two = tl.cast(second, tl.int32).to(tl.uint32, bitcast=True)
    word = places.to(tl.uint32, bitcast=True) ^ one
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15) ^ two) * 0x846CA68B
    return word ^ (word >> 16)


@kernel
def uniform(places: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Return the random multiples of 2^-24 in [0, 1) of ``places``."""
    return (noise(places, first, second) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@kernel
def sums(
    terms: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> tl.tensor:
    """Return the sums (ROWS,) of ``terms`` (ROWS, BLOCK): the second half is added to the first, again and again."""
    for i in tl.static_range(HALVINGS):
        terms = tl.sum(tl.reshape(terms, (ROWS, 2, BLOCK >> (i + 1))), axis=1)
    return tl.reshape(terms, (ROWS,))


@kernel
def divided(x: tl.tensor, divisors: tl.tensor) -> tl.tensor:
    """Return ``x`` (ROWS, BLOCK) over ``divisors`` (ROWS,), correctly rounded; a divisor of zero leaves zeros."""
    divisors = tl.where(divisors > 0, divisors, float("inf"))
    return tl.div_rn(x, tl.broadcast_to(tl.expand_dims(divisors, 1), x.shape))


@kernel
def cut(x: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """Return ``x`` in -highest to highest."""
    return tl.minimum(tl.maximum(x, -highest), highest)


@kernel
def largest_magnitudes(x: tl.tensor) -> tl.tensor:
    """Return the largest magnitude of each row, cut at 2^127."""
    return tl.minimum(tl.max(tl.abs(x), axis=1), 1.7014118346046923e38)


@kernel
def factors(
    shares: tl.tensor,
    levels: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> tl.tensor:
    """Return <shares, levels> / <levels, levels> of each row, or 0; see micro.codecs.blocks.least_squares."""
    inner = sums(shares * levels, ROWS, BLOCK, HALVINGS)
    squares = sums(levels * levels, ROWS, BLOCK, HALVINGS)
    return tl.div_rn(inner, tl.maximum(squares, 1.1754943508222875e-38))


@kernel
def store_packed(
    packed: tl.tensor,
    codes: tl.tensor,
    rows: tl.tensor,
    end: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write int32 ``codes`` (ROWS, BLOCK) of ``WIDTH`` bits side by side; those of values from ``end`` on are zero."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = BLOCK // PER_BYTE
    shifts = tl.reshape(tl.arange(0, PER_BYTE) * WIDTH, (1, 1, PER_BYTE))
    filled = tl.sum(tl.reshape(codes, (ROWS, BYTES, PER_BYTE)) << shifts, axis=2)
    places = tl.expand_dims(rows * BYTES, 1) + tl.expand_dims(tl.arange(0, BYTES), 0)
    tl.store(packed + places, filled.to(tl.uint8), mask=places < tl.cdiv(end, PER_BYTE))
