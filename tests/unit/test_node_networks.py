"""Networks of two speeds, against messages that are counted one by one."""

import itertools

import pytest

import micro
from micro.operations import OPS, Op, bytes_sent
from micro.planning.collectives import Link
from micro.planning.costs import Flat
from micro.planning.nodes import FlatOnNodes, Hierarchical, NodeNetwork, level_bytes, seconds_of
from micro.planning.volumes import volume_of

FAST, SLOW = Link(2e-6, 1e-11), Link(3e-5, 1e-9)
M = 1.2e6
SIZES = [(2, 2), (4, 3), (3, 5)]  # ranks of a node, nodes
KINDS = (FlatOnNodes, Hierarchical)


def nodes(local: int, num_nodes: int, *, kind: type = FlatOnNodes, rails: int = 1) -> NodeNetwork:
    network: NodeNetwork = kind(intra=FAST, inter=SLOW, ranks_per_node=local, num_nodes=num_nodes, rails=rails)
    return network


def pairs(local: int, num_nodes: int) -> list[tuple[bool, int]]:
    """Every message of ranks that each send one to each other: whether it leaves its node, and its sender."""
    ranks = range(local * num_nodes)
    return [(a // local != b // local, a) for a, b in itertools.permutations(ranks, 2)]


@pytest.mark.parametrize(("local", "num_nodes"), SIZES)
def test_a_ring_is_as_slow_as_its_messages_between_nodes(local: int, num_nodes: int) -> None:
    n = local * num_nodes
    clock = [0.0] * n
    for _ in range(2 * (n - 1)):
        before = list(clock)
        for rank in range(n):
            source = (rank - 1) % n
            link = FAST if source // local == rank // local else SLOW
            clock[rank] = max(before[source], before[rank]) + link.alpha_s + M / n * link.beta_s
    network = nodes(local, num_nodes)
    assert network.seconds("all_reduce", M) == pytest.approx(max(clock))
    for op in ("gather_rows", "gather_lists"):
        assert network.seconds(op, M / n) == pytest.approx(max(clock) / 2)


@pytest.mark.parametrize(("local", "num_nodes"), SIZES)
def test_what_is_scattered_shares_the_interfaces_of_a_node(local: int, num_nodes: int) -> None:
    leaving = [a for leaves, a in pairs(local, num_nodes) if leaves and a < local]  # of the first node
    of_a_rank, inside = len(leaving) / local, local - 1
    for rails in (1, 2):
        expected = of_a_rank * SLOW.alpha_s + len(leaving) * M * SLOW.beta_s / rails
        expected += inside * (FAST.alpha_s + M * FAST.beta_s)
        network = nodes(local, num_nodes, rails=rails)
        assert network.seconds("scatter", (network.world_size - 1) * M) == pytest.approx(expected)


@pytest.mark.parametrize(("local", "num_nodes"), SIZES)
def test_bytes_of_each_level_are_those_of_the_messages(local: int, num_nodes: int) -> None:
    n, network = local * num_nodes, nodes(local, num_nodes)
    crossing = sum(leaves for leaves, _ in pairs(local, num_nodes)) / n
    assert network.bytes_by_level("scatter", (n - 1) * M) == pytest.approx(((n - 1 - crossing) * M, crossing * M))
    edges = sum(rank // local != (rank + 1) % n // local for rank in range(n))  # of the ring
    each = 2 * (n - 1) * M / n / n
    assert network.bytes_by_level("all_reduce", M) == pytest.approx(((n - edges) * each, edges * each))
    every = (n - 1) * M / n
    assert network.bytes_by_level("gather_lists", M) == pytest.approx(((n - edges) * every, edges * every))
    for op in OPS:
        assert sum(network.bytes_by_level(op, M)) == pytest.approx(bytes_sent(op, M, n))
        between = nodes(local, num_nodes, kind=Hierarchical).bytes_by_level(op, M)[1]
        assert between <= network.bytes_by_level(op, M)[1] * (1 + 1e-12)


@pytest.mark.parametrize("op", OPS)
def test_nodes_of_one_level_are_flat(op: Op) -> None:
    assert nodes(6, 1).seconds(op, M) == pytest.approx(Flat(FAST, 6).seconds(op, M))
    assert nodes(1, 6).seconds(op, M) == pytest.approx(Flat(SLOW, 6).seconds(op, M))
    assert nodes(6, 1).bytes_by_level(op, M) == (pytest.approx(bytes_sent(op, M, 6)), 0.0)
    assert nodes(1, 6).bytes_by_level(op, M) == (pytest.approx(0.0), pytest.approx(bytes_sent(op, M, 6)))
    for kind in KINDS:
        assert nodes(1, 1, kind=kind).seconds(op, M) == 0.0


@pytest.mark.parametrize("op", OPS)
def test_more_bytes_take_longer(op: Op) -> None:
    for kind, (local, num_nodes) in itertools.product(KINDS, SIZES):
        seconds = [nodes(local, num_nodes, kind=kind).seconds(op, size) for size in (0.0, 1e3, 1e6, 1e9)]
        assert seconds == sorted(set(seconds))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_mean_in_two_levels_is_a_hierarchical_all_reduce_and_a_header(kind: type) -> None:
    local, num_nodes, numel = 4, 8, 64_000
    two_level = micro.TwoLevel(reducer=micro.DenseReducer(), ranks_per_node=local)
    volume, network = volume_of(two_level, numel, local * num_nodes), nodes(local, num_nodes, kind=kind)
    header = Flat(FAST, local).seconds("gather_rows", 4 * (4 + num_nodes))
    whole = nodes(local, num_nodes, kind=Hierarchical).seconds("all_reduce", 4 * numel)
    assert seconds_of(volume, network) == pytest.approx(whole + header)
    within, between = level_bytes(volume, network)
    assert (within, between) == pytest.approx((volume.local_bytes, volume.between_bytes))
    dense = volume_of(micro.DenseReducer(), numel, local * num_nodes)
    assert between == pytest.approx(level_bytes(dense, nodes(local, num_nodes, kind=Hierarchical))[1])


def test_dense_parameters_beside_two_levels_are_paid_for_by_all_ranks() -> None:
    layout = micro.Layout(("matrix", "bias"), ((8, 16), (12,)))
    two_level = micro.TwoLevel(reducer=micro.SparseReducer(micro.Micro(), 0.1), ranks_per_node=2)
    split, network = micro.Split(reducer=two_level, min_dims=2), nodes(2, 3)
    volume = volume_of(split, layout.numel, 6, layout=layout)
    alone = volume_of(two_level, 128, 6, layout=micro.Layout(("matrix",), ((8, 16),)))
    assert seconds_of(volume, network) == pytest.approx(
        seconds_of(alone, network) + network.seconds("all_reduce", 4 * 12)
    )
    assert sum(level_bytes(volume, network)) == pytest.approx(volume.local_bytes + volume.between_bytes)


def test_mistakes_are_one_line() -> None:
    volume = volume_of(micro.TwoLevel(reducer=micro.DenseReducer(), ranks_per_node=2), 100, 4)
    with pytest.raises(ValueError, match="needs a network of two speeds, within nodes and between them: this one has"):
        seconds_of(volume, Flat(FAST, 4))
    with pytest.raises(ValueError, match="two_level has 2 ranks per node, the network 4: give both the same"):
        seconds_of(volume, nodes(4, 1))
    with pytest.raises(ValueError, match=r"op must be one of all_reduce, .*, got 'reduce'"):
        nodes(2, 2).seconds("reduce", 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rails must be in \[1, 2\]"):
        nodes(2, 2, rails=3)
