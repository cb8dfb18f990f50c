"""Methods between nodes of two ranks, whose gradients are averaged densely; and the same of some parameters only."""

from dataclasses import replace

import torch

import micro
from tests.sparsifiers.base import (
    BUILD_UP,
    EXACT,
    Bytes,
    Make,
    Outcome,
    Row,
    agreed_counts,
    dense_values,
    lists,
    no_bytes,
    raw_lists,
    rows,
    union_values,
)
from tests.sparsifiers.split import NUM_BIAS, and_dense, rest

RANKS_PER_NODE = 2
PLACES = (  # of the layout in tests/unit/test_laws.py: halves of its parameters
    (range(64), range(128, 132), range(136, 197)),
    (range(64, 128), range(132, 136), range(197, 257)),
)
GATHER = micro.Gather()


def two_level(reducer: micro.Reducer, density: micro.Density | float, seed: int) -> micro.TwoLevel:
    """Return ``reducer`` between nodes."""
    if isinstance(reducer, micro.SparseReducer):
        reducer = replace(reducer, density=density, seed=seed)
    return micro.TwoLevel(reducer=reducer, ranks_per_node=RANKS_PER_NODE)


def between_nodes(reducer: micro.Reducer) -> Make:
    """Return a maker of ``reducer`` between nodes."""
    return lambda density, seed: two_level(reducer, density, seed)


def num_updated(outcome: Outcome, rank: int, *, with_bias: bool = True) -> int:
    """Return how many elements of a rank's shard are updated."""
    assert outcome.update is not None
    weight, bias, last = PLACES[rank % RANKS_PER_NODE]
    indices = [*weight, *(bias if with_bias else ()), *last]
    return int(torch.count_nonzero(outcome.update[indices]))


def between(inner: Bytes, *, with_bias: bool = True) -> Bytes:
    """Bytes of the exchange of a shard with the ranks of the same place in other nodes."""

    def sent(outcome: Outcome, rank: int) -> float:
        nodes = outcome.world_size // RANKS_PER_NODE
        counts = outcome.counts[rank % RANKS_PER_NODE :: RANKS_PER_NODE]
        updated = num_updated(outcome, rank, with_bias=with_bias)
        shard = replace(outcome, world_size=nodes, counts=counts, num_updated=updated)
        return inner(shard, rank // RANKS_PER_NODE)

    return sent


def header(outcome: Outcome, rank: int) -> float:
    """Four numbers and the counts of all nodes, to the other rank of the node."""
    return 4 * (4 + outcome.world_size // RANKS_PER_NODE)


def pairs(element_bytes: int, *, with_bias: bool = True) -> Bytes:
    """The update of the own shard, to the other rank."""
    return lambda outcome, rank: element_bytes * num_updated(outcome, rank, with_bias=with_bias)


def shard_values(*, with_bias: bool = True) -> Bytes:
    """The gradient of the other rank's shard, and the values of the own update."""

    def sent(outcome: Outcome, rank: int) -> float:
        weight, bias, last = PLACES[(rank + 1) % RANKS_PER_NODE]
        other = len(weight) + len(last) + (len(bias) if with_bias else 0)
        return outcome.value_bytes * (other + num_updated(outcome, rank, with_bias=with_bias))

    return sent


def added(*parts: Bytes) -> Bytes:
    """Sum of several messages."""
    return lambda outcome, rank: sum(part(outcome, rank) for part in parts)


MICRO, TOPK = micro.SparseReducer(micro.Micro(), 0.05), micro.SparseReducer(micro.TopK(), 0.05, exchange=GATHER)

ROWS: tuple[Row, ...] = (
    Row(
        name="two_level+dense",
        make=between_nodes(micro.DenseReducer()),
        band=EXACT,
        counts=header,
        indices=no_bytes,
        values=added(between(dense_values), shard_values()),
        num_collectives=4,
        follows_density=False,
        ranks_per_node=RANKS_PER_NODE,
        states_traffic=False,
    ),
    Row(
        name="two_level+micro",
        make=between_nodes(MICRO),
        band=EXACT,
        counts=added(header, between(agreed_counts)),
        indices=added(pairs(4), between(lists(4))),
        values=added(between(union_values), shard_values()),
        num_collectives=7,
        follows_density=False,  # k is that of each shard, in sum
        rule="agreed",
        own_thresholds=True,
        ranks_per_node=RANKS_PER_NODE,
        states_traffic=False,
    ),
    Row(
        name="two_level+topk+gather",
        make=between_nodes(TOPK),
        band=BUILD_UP,
        counts=added(header, between(rows(8))),
        indices=added(pairs(4), between(lists(4))),
        values=added(between(raw_lists), shard_values()),
        num_collectives=7,
        follows_density=False,
        own_thresholds=True,
        ranks_per_node=RANKS_PER_NODE,
        states_traffic=False,
    ),
    Row(
        name="two_level+split+micro",
        make=lambda density, seed: two_level(
            micro.Split(reducer=replace(MICRO, density=density, seed=seed), min_dims=2), density, seed
        ),
        band=EXACT,
        counts=added(header, between(rest(agreed_counts, NUM_BIAS // 2))),
        indices=added(pairs(4), between(rest(lists(4), NUM_BIAS // 2))),
        values=added(between(and_dense(union_values, NUM_BIAS // 2)), shard_values()),
        num_collectives=8,
        follows_density=False,
        rule="agreed",
        own_thresholds=True,
        dense=("a.bias",),
        ranks_per_node=RANKS_PER_NODE,
        states_traffic=False,
    ),
    Row(
        name="split+two_level+topk+gather",
        make=lambda density, seed: micro.Split(reducer=two_level(TOPK, density, seed), min_dims=2),
        band=BUILD_UP,
        counts=added(header, between(rest(rows(8), NUM_BIAS), with_bias=False)),
        indices=added(pairs(4, with_bias=False), rest(between(lists(4), with_bias=False), NUM_BIAS)),
        values=and_dense(added(between(raw_lists, with_bias=False), shard_values(with_bias=False)), NUM_BIAS),
        num_collectives=8,
        follows_density=False,
        names_rank=False,
        own_thresholds=True,
        dense=("a.bias",),
        ranks_per_node=RANKS_PER_NODE,
    ),
)
