"""Methods that look at parameters one by one: layer-wise top-k, Accordion, PowerSGD."""

from typing import Any

import micro
from micro.parts import Rule
from micro.reducers.powersgd import PowerSGD
from tests.sparsifiers.base import (
    EXACT,
    Band,
    Make,
    Outcome,
    Row,
    all_reduce,
    lists,
    no_bytes,
    raw_lists,
    rows,
    sparse,
    union_values,
)

# At least one element of each of three layers: up to 2 more than k, and as many fewer by rounding down.
LAYERS = Band(0.8, lambda world_size: 1.2 * world_size)
NUM_ROWS, NUM_COLUMNS, NUM_REST = 8 + 11, 16 + 11, 8  # of the layout in tests/unit/test_laws.py
RANK = 2


def powersgd_values(outcome: Outcome, rank: int) -> float:
    """All-reduce of thin factors and of what travels whole; and of a flag."""
    first = RANK * NUM_ROWS + NUM_REST + 1
    return all_reduce(outcome.value_bytes * (first + RANK * NUM_COLUMNS), outcome.world_size)


def accordion(rule: Rule) -> Make:
    """Return a maker of top-k by layer with Accordion's density: doubled where critical, checked every other step."""

    def make(density: micro.Density[Any] | float, seed: int) -> micro.Reducer:
        low = density.density if isinstance(density, micro.Density) else density
        settings = {"name": "accordion", "density": low, "high": 2 * low, "interval": 2, "rule": rule}
        policy = micro.build(micro.Density, settings)
        return micro.SparseReducer(micro.TopK(scope="layer"), policy, exchange=micro.Gather(), seed=seed)

    return make


def by_name(density: micro.Density[Any] | float, seed: int) -> micro.Reducer:
    """Make top-k by layer with another density for some layers."""
    rest = density.density if isinstance(density, micro.Density) else density
    policy = micro.ByName(patterns={"*a*.bias": 0.5, "*[b1].weight": 0.02}, density=rest)
    return micro.SparseReducer(micro.TopK(scope="layer"), policy, seed=seed)


def reduced_energies(outcome: Outcome, rank: int) -> float:
    """Header of the gather exchange; every other step, three float64 energies summed over the ranks."""
    return rows(8)(outcome, rank) + (all_reduce(24, outcome.world_size) if outcome.num_extra else 0.0)


def broadcast_energies(outcome: Outcome, rank: int) -> float:
    """Header of the gather exchange; every other step, three float64 energies from rank 0."""
    sent = 24 * (outcome.world_size - 1) / outcome.world_size
    return rows(8)(outcome, rank) + (sent if outcome.num_extra else 0.0)


ROWS: tuple[Row, ...] = (
    Row(
        name="topk+layers+union",
        make=sparse(micro.TopK(scope="layer")),
        band=LAYERS,
        counts=no_bytes,
        indices=lists(4),
        values=union_values,
        num_collectives=2,
    ),
    Row(
        name="topk+layers+gather",
        make=sparse(micro.TopK(scope="layer"), exchange=micro.Gather()),
        band=LAYERS,
        counts=rows(8),
        indices=lists(4),
        values=raw_lists,
        num_collectives=3,
    ),
    Row(
        name="topk+layers+by_name",
        make=by_name,
        band=LAYERS,
        counts=no_bytes,
        indices=lists(4),
        values=union_values,
        num_collectives=2,
        follows_density=False,
    ),
    Row(
        name="accordion",
        make=accordion("repaired"),
        band=None,
        counts=reduced_energies,
        indices=lists(4),
        values=raw_lists,
        num_collectives=3,
        follows_density=False,
        rule="repaired",
    ),
    Row(
        name="accordion+published",
        make=accordion("published"),
        band=None,
        counts=broadcast_energies,
        indices=lists(4),
        values=raw_lists,
        num_collectives=3,
        follows_density=False,
        rule="published",
    ),
    Row(
        name="powersgd",
        make=lambda _density, seed: PowerSGD(rank=RANK, min_compression=1.5, seed=seed),
        band=EXACT,
        counts=no_bytes,
        indices=no_bytes,
        values=powersgd_values,
        num_collectives=2,
        follows_density=False,
        mixes=True,
    ),
)
