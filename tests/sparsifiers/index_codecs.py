"""Compositions with indices that travel in fewer bits."""

import math
from collections.abc import Callable

import micro
from micro.codecs.indices import Bitmap, Packed, Shortest
from tests.sparsifiers.base import (
    BUILD_UP,
    EXACT,
    Bytes,
    Outcome,
    Row,
    agreed_counts,
    encoded_values,
    gathered,
    no_bytes,
    raw_lists,
    rows,
    sparse,
    union_values,
)

Size = Callable[[int, int], int]  # count, span -> bytes
GATHER, HALF = micro.Gather(), micro.Half()


def elias_fano(count: int, span: int) -> int:
    """Bytes of low parts side by side, and of high parts as a bitmap."""
    if not count:
        return 0
    low = max(math.floor(math.log2(span / count)), 0)
    return math.ceil(count * low / 8) + math.ceil((count + (span - 1) // 2**low) / 8)


def bitmap(count: int, span: int) -> int:
    """Bytes of one bit a place."""
    return math.ceil(span / 8) if count else 0


def shortest(count: int, span: int) -> int:
    """Bytes of the shortest form."""
    return min(4 * count, elias_fano(count, span), bitmap(count, span))


def whole(size: Size) -> Bytes:
    """Each rank's own list of indices out of the whole vector, to every other rank."""
    return lambda outcome, rank: gathered([size(count, outcome.numel) for count in outcome.counts], rank)


def sliced(size: Size) -> Bytes:
    """Each rank's own list of indices out of its slice of the step, to every other rank."""

    def sent(outcome: Outcome, rank: int) -> float:
        n, numel = outcome.world_size, outcome.numel
        parts = [(outcome.step + place) % n for place in range(n)]
        spans = [numel // n + (part < numel % n) for part in parts]
        return gathered([size(*list_) for list_ in zip(outcome.counts, spans, strict=True)], rank)

    return sent


def one_list(size: Size) -> Bytes:
    """The leader's list to all, as a mean over the ranks."""
    return lambda outcome, rank: (
        size(sum(outcome.counts), outcome.numel) * (outcome.world_size - 1) / outcome.world_size
    )


ROWS: tuple[Row, ...] = (
    Row(
        name="topk+union+packed",
        make=sparse(micro.TopK(), indices=Packed()),
        band=BUILD_UP,
        counts=no_bytes,
        indices=whole(elias_fano),
        values=union_values,
        num_collectives=2,
    ),
    Row(
        name="topk+gather+bitmap",
        make=sparse(micro.TopK(), exchange=GATHER, indices=Bitmap()),
        band=BUILD_UP,
        counts=rows(8),
        indices=whole(bitmap),
        values=raw_lists,
        num_collectives=3,
    ),
    Row(
        name="leader+shortest",
        make=sparse(micro.Leader(), indices=Shortest()),
        band=EXACT,
        counts=no_bytes,
        indices=one_list(shortest),
        values=union_values,
        num_collectives=2,
    ),
    Row(
        name="micro+agreed+half+shortest",
        make=sparse(micro.Micro(), codec=HALF, indices=Shortest()),
        band=EXACT,
        counts=agreed_counts,
        indices=sliced(shortest),
        values=encoded_values(lambda count: 2 * count),
        num_collectives=4,
        rule="agreed",
    ),
)
