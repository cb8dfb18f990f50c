"""Other ways to meet: gTop-k, DSA, and the published form of gather."""

import torch
from torch import Tensor

import micro
from micro.exchanges.dsa import DSA
from micro.zoo.gtopk import GTopK
from tests.sparsifiers.base import (
    BUILD_UP,
    EXACT,
    Bytes,
    Outcome,
    Row,
    gathered,
    lists,
    raw_lists,
    rows,
    sparse,
)


def tree(entry_bytes: int) -> Bytes:
    """Up the tree once from every rank but the first, and a broadcast as a mean over the ranks: k entries each."""

    def sent(outcome: Outcome, rank: int) -> float:
        n, k = outcome.world_size, outcome.num_updated
        return entry_bytes * k * ((rank > 0) + (n - 1) / n)

    return sent


def tree_counts(outcome: Outcome, rank: int) -> float:
    """A number for the list, and one for each rank whose choice is in it."""
    n = outcome.world_size
    up = 1 + min(rank & -rank, n - rank) if rank else 0
    return 4 * (up + (1 + n) * (n - 1) / n) if n > 1 else 0.0


def tree_values(outcome: Outcome, rank: int) -> float:
    """Values of full length on the way through the tree."""
    return tree(outcome.value_bytes)(outcome, rank)


def at_top(outcome: Outcome, *, drop_smallest: bool) -> Tensor:
    """Return (world_size, numel), True where a rank sends its value under top-k."""
    assert outcome.acc is not None
    magnitudes = outcome.acc.abs()
    order = magnitudes.argsort(dim=1, descending=True)[:, : outcome.counts[0] - drop_smallest]
    return torch.zeros_like(magnitudes, dtype=torch.bool).scatter_(1, order, True)


def regional(element_bytes: tuple[int, int], *, published: bool) -> Bytes:
    """Return what split and gather send where an entry takes some bytes as one of a pair and some of a dense region."""
    as_pair, as_dense = element_bytes

    def sent(outcome: Outcome, rank: int) -> float:
        n, d, w = outcome.world_size, outcome.numel, outcome.value_bytes
        chosen = at_top(outcome, drop_smallest=published)
        regions = [slice(r * (d // n) + min(r, d % n), (r + 1) * (d // n) + min(r + 1, d % n)) for r in range(n)]
        mine, distinct = regions[rank], chosen.any(0)
        dense = 3 * distinct.sum() >= d if published else w * d < (4 + w) * distinct.sum()
        held = [as_dense * (r.stop - r.start) if dense else as_pair * int(distinct[r].sum()) for r in regions]
        return as_pair * int(chosen[rank].sum() - chosen[rank, mine].sum()) + gathered(held, rank)

    return sent


def regional_indices(*, published: bool) -> Bytes:
    """Indices of 4 bytes, which dense regions do without."""
    return regional((4, 0), published=published)


def regional_values(*, published: bool) -> Bytes:
    """Values of full length."""
    return lambda outcome, rank: regional((outcome.value_bytes,) * 2, published=published)(outcome, rank)


ROWS: tuple[Row, ...] = (
    Row(
        name="gtopk",
        make=sparse(micro.TopK(), exchange=GTopK()),
        band=EXACT,
        counts=tree_counts,
        indices=tree(4),
        values=tree_values,
        num_collectives=3,
        rule="repaired",
    ),
    Row(
        name="gtopk+published",
        make=sparse(micro.TopK(), exchange=GTopK(rule="published")),
        band=EXACT,
        counts=tree_counts,
        indices=tree(8),
        values=tree(8),
        num_collectives=3,
        conserves_mass=False,
        rule="published",
    ),
    Row(
        name="dsa",
        make=sparse(micro.TopK(), exchange=DSA()),
        band=BUILD_UP,
        counts=rows(16),
        indices=regional_indices(published=False),
        values=regional_values(published=False),
        num_collectives=5,
        rule="repaired",
    ),
    Row(
        name="dsa+published",
        make=sparse(micro.TopK(), exchange=DSA(rule="published")),
        band=None,
        counts=rows(16),
        indices=regional_indices(published=True),
        values=regional_values(published=True),
        num_collectives=5,
        conserves_mass=False,
        rule="published",
    ),
    Row(
        name="threshold+gather+published",
        make=sparse(micro.Threshold(), exchange=micro.Gather(rule="published")),
        band=None,
        counts=rows(8),
        indices=lists(4),
        values=raw_lists,
        num_collectives=3,
        conserves_mass=False,
        rule="published",
    ),
)
