"""Compositions whose choice and whose transport differ in scope: within each tensor, or in pieces."""

import math
from dataclasses import replace

import micro
from micro.selectors.scaled_elements import ScaledElements
from tests.sparsifiers.base import (
    BUILD_UP,
    EXACT,
    Bytes,
    Outcome,
    Row,
    agreed_counts,
    all_reduce,
    broadcast,
    gathered,
    lists,
    no_bytes,
    raw_lists,
    rows,
    sparse,
    union_values,
)
from tests.sparsifiers.other_exchanges import at_top

GATHER, NUM_LAYERS = micro.Gather(), 3  # in the layout of the laws
PIECE_BYTES = 1100  # one piece of the laws' 257 elements in single precision, two in double
PIECE_MB = PIECE_BYTES / 2**20


def per_tensor(selector: micro.Selector) -> micro.Selector:
    """Return the selector within each tensor."""
    return micro.PerTensor(selector=selector)


def in_pieces(each: micro.Exchange) -> micro.Exchange:
    """Return the exchange piece by piece."""
    return micro.InPieces(each=each, piece_mb=PIECE_MB)


def num_pieces(outcome: Outcome) -> int:
    """Pieces of the whole vector."""
    return math.ceil(outcome.numel / (PIECE_BYTES // outcome.value_bytes))


def rows_by_piece(row_bytes: int) -> Bytes:
    """All-gather of a row per rank for each piece."""
    return lambda outcome, rank: num_pieces(outcome) * rows(row_bytes)(outcome, rank)


def values_by_piece(outcome: Outcome, rank: int) -> float:
    """All-reduce of the union's values, and of a finite flag for each piece."""
    flags = all_reduce(outcome.value_bytes * (num_pieces(outcome) - 1), outcome.world_size)
    return union_values(outcome, rank) + flags


def lists_by_piece(element_bytes: int | None) -> Bytes:
    """Each rank's own list of top-k to all others, piece by piece, of elements at full length or of so many bytes."""

    def sent(outcome: Outcome, rank: int) -> float:
        size = element_bytes or outcome.value_bytes
        pieces = at_top(outcome, drop_smallest=False).tensor_split(num_pieces(outcome), dim=1)
        return sum(gathered([size * int(count) for count in piece.sum(1)], rank) for piece in pieces)

    return sent


def agreed_by_piece(outcome: Outcome, rank: int) -> float:
    """MiCRO's counts, and a count to every other rank for each piece, where there are several."""
    pieces = num_pieces(outcome)
    if pieces == 1:
        return agreed_counts(outcome, rank)
    searched = replace(outcome, num_extra=outcome.num_extra - 3 * pieces + 2)
    return agreed_counts(searched, rank) + rows_by_piece(4)(outcome, rank)


def agreed_by_tensor(outcome: Outcome, rank: int) -> float:
    """At most: 32 counts of each tensor to every other rank; where cuts were lost, those again and wide histograms."""
    histograms = outcome.num_extra * NUM_LAYERS * all_reduce(2040 * 4, outcome.world_size)
    return rows(128 * NUM_LAYERS * (1 + outcome.num_extra))(outcome, rank) + histograms


def scaled_counts(outcome: Outcome, rank: int) -> float:
    """MiCRO's counts, and the mean squares of each parameter."""
    return agreed_counts(outcome, rank) + all_reduce(8 * NUM_LAYERS, outcome.world_size)


def scaled_elements_counts(outcome: Outcome, rank: int) -> float:
    """MiCRO's counts, and in the first step the mean squares of each parameter."""
    if outcome.step:
        return agreed_counts(outcome, rank)
    first = replace(outcome, num_extra=outcome.num_extra - 1)
    return agreed_counts(first, rank) + all_reduce(8 * NUM_LAYERS, outcome.world_size)


ROWS: tuple[Row, ...] = (
    Row(
        name="per_tensor+topk+gather",
        make=sparse(per_tensor(micro.TopK()), exchange=GATHER),
        band=BUILD_UP,
        counts=rows(8),
        indices=lists(4),
        values=raw_lists,
        num_collectives=3,
        by_tensor=True,
    ),
    Row(
        name="per_tensor+micro+agreed",
        make=sparse(per_tensor(micro.Micro())),
        band=EXACT,
        counts=agreed_by_tensor,
        indices=lists(4),
        values=union_values,
        num_collectives=3,
        rule="agreed",
        upper_bounds=True,
        by_tensor=True,
    ),
    Row(
        name="per_tensor+micro+published",
        make=sparse(per_tensor(micro.Micro(rule="published"))),
        band=None,
        counts=rows(4 * NUM_LAYERS),
        indices=lists(4),
        values=union_values,
        num_collectives=3,
        rule="published",
        by_tensor=True,
    ),
    Row(
        name="per_tensor+leader",
        make=sparse(per_tensor(micro.Leader())),
        band=EXACT,
        counts=no_bytes,
        indices=broadcast,
        values=union_values,
        num_collectives=2,
        by_tensor=True,
    ),
    Row(
        name="scaled+micro+agreed",
        make=sparse(micro.Scaled(selector=micro.Micro())),
        band=EXACT,
        counts=scaled_counts,
        indices=lists(4),
        values=union_values,
        num_collectives=4,
        rule="agreed",
    ),
    Row(
        name="scaled_elements+micro+agreed",
        make=sparse(ScaledElements(selector=micro.Micro())),
        band=EXACT,
        counts=scaled_elements_counts,
        indices=lists(4),
        values=union_values,
        num_collectives=3,
        rule="agreed",
    ),
    Row(
        name="in_pieces+topk+gather",
        make=sparse(micro.TopK(), exchange=in_pieces(GATHER)),
        states_traffic=False,
        band=BUILD_UP,
        counts=rows_by_piece(8),
        indices=lists_by_piece(4),
        values=lists_by_piece(None),
        num_collectives=3,
    ),
    Row(
        name="in_pieces+micro+agreed",
        make=sparse(micro.Micro(), exchange=in_pieces(micro.Union())),
        states_traffic=False,
        band=EXACT,
        counts=agreed_by_piece,
        indices=lists(4),
        values=values_by_piece,
        num_collectives=3,
        rule="agreed",
    ),
)
