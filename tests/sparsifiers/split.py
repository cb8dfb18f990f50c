"""Methods that sparsify some parameters and reduce the others densely."""

from dataclasses import replace

import micro
from tests.sparsifiers.base import (
    BUILD_UP,
    EXACT,
    Bytes,
    Make,
    Outcome,
    Row,
    agreed_counts,
    all_reduce,
    lists,
    no_bytes,
    raw_lists,
    rows,
    union_values,
)

RANK = 2
NUM_BIAS, NUM_FIRST = 8, 8 * 16  # elements of a.bias and a.weight in the layout of tests/unit/test_laws.py


def split(part: micro.SparseReducer, **which: object) -> Make:
    """Return a maker of ``part`` on some parameters only."""
    return lambda density, seed: micro.Split(reducer=replace(part, density=density, seed=seed), **which)  # type: ignore[arg-type]


def rest(inner: Bytes, num_dense: int) -> Bytes:
    """Bytes of the sparse parameters alone; in a layout without dense parameters there is nothing to take off."""

    def sent(outcome: Outcome, rank: int) -> float:
        counts = tuple(count - num_dense for count in outcome.counts)
        return inner(replace(outcome, counts=counts, num_updated=outcome.num_updated - num_dense), rank)

    return sent


def and_dense(inner: Bytes, num_dense: int) -> Bytes:
    """Add the all-reduce of the dense parameters."""
    return lambda outcome, rank: (
        rest(inner, num_dense)(outcome, rank) + all_reduce(num_dense * outcome.value_bytes, outcome.world_size)
    )


def factors(outcome: Outcome, rank: int) -> float:
    """All-reduce of the factors of a.weight and b.weight, and of a flag."""
    return all_reduce(outcome.value_bytes * (RANK * (8 + 11 + 16 + 11) + 1), outcome.world_size)


ROWS: tuple[Row, ...] = (
    Row(
        name="split+micro",
        make=split(micro.SparseReducer(micro.Micro(), 0.1), min_dims=2),
        band=EXACT,
        counts=rest(agreed_counts, NUM_BIAS),
        indices=rest(lists(4), NUM_BIAS),
        values=and_dense(union_values, NUM_BIAS),
        num_collectives=4,
        follows_density=False,
        names_rank=False,  # a.bias is dense, and its mean is the same on all ranks
        rule="agreed",
        dense=("a.bias",),
    ),
    Row(
        name="split+topk+gather",
        make=split(micro.SparseReducer(micro.TopK(), 0.1, exchange=micro.Gather()), dense=("*a*.weight",)),
        band=BUILD_UP,
        counts=rest(rows(8), NUM_FIRST),
        indices=rest(lists(4), NUM_FIRST),
        values=and_dense(raw_lists, NUM_FIRST),
        num_collectives=4,
        follows_density=False,
        dense=("a.weight",),
    ),
    Row(
        name="split+powersgd",
        make=lambda _density, seed: micro.Split(
            reducer=micro.PowerSGD(rank=RANK, min_compression=1.5, seed=seed), min_dims=2
        ),
        band=EXACT,
        counts=no_bytes,
        indices=no_bytes,
        values=and_dense(factors, NUM_BIAS),
        num_collectives=3,
        follows_density=False,
        names_rank=False,
        mixes=True,
        dense=("a.bias",),
    ),
)
