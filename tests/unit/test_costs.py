"""The closed forms of collectives, against algorithms that are carried out message by message."""

import itertools
from collections.abc import Callable, Iterable

import pytest

import micro
from micro.operations import OPS, Op, bytes_sent
from micro.planning.costs import ALGORITHMS, PUBLISHED_TREE, Best, Flat, Link, Network, gather_part, scaled
from micro.planning.nodes import FlatOnNodes, Hierarchical, NodeNetwork, level_bytes, seconds_of
from micro.planning.tables import Curve, LinkTable
from micro.planning.volumes import volume_of

LINK = Link(3e-5, 2e-9, 5e-10)
FAST, SLOW = Link(2e-6, 1e-11), Link(3e-5, 1e-9)
M = 1.2e6
NODES = [(2, 2), (4, 3), (3, 5)]  # ranks of a node, nodes
KINDS = (FlatOnNodes, Hierarchical)


class Ranks:
    """Clocks of ranks that send messages: each sends one at a time and receives one at a time, both at once.

    ``held[r]`` is what rank r knows: for each part of the vector, whose contributions are in it.
    """

    def __init__(self, n: int, held: Callable[[int, int], set[int]]) -> None:
        self.n, self.clock = n, [0.0] * n
        self.held = [[held(rank, part) for part in range(n)] for rank in range(n)]

    def step(self, messages: Iterable[tuple[int, int, Iterable[int]]], *, part_bytes: float, adds: bool) -> None:
        """Send lists of parts at once; the receiver adds them to its own, or takes them."""
        before, held = list(self.clock), [list(parts) for parts in self.held]
        for source, target, parts in messages:
            size = part_bytes * len(list(parts))
            sent = LINK.alpha_s + size * LINK.beta_s
            arrived = max(before[source], before[target]) + sent + size * LINK.gamma_s * adds
            self.clock[target] = max(self.clock[target], arrived)
            self.clock[source] = max(self.clock[source], before[source] + sent)
            for part in parts:
                assert not adds or not self.held[target][part] & held[source][part], "added twice"
                self.held[target][part] = self.held[target][part] | held[source][part]

    def seconds(self, whole: Callable[[int], set[int]]) -> float:
        """Return when the last rank is done; every rank then holds ``whole(part)`` of each part."""
        assert all(parts == [whole(part) for part in range(self.n)] for parts in self.held)
        return max(self.clock)


def all_gather(ranks: Ranks, part_bytes: float, first: int = 0) -> None:
    for turn in range(ranks.n - 1):
        steps = [(r, (r + 1) % ranks.n, [(r + first - turn) % ranks.n]) for r in range(ranks.n)]
        ranks.step(steps, part_bytes=part_bytes, adds=False)


def ring(n: int, ranks: Ranks) -> None:
    for turn in range(n - 1):
        ranks.step([(r, (r + 1) % n, [(r - turn) % n]) for r in range(n)], part_bytes=M / n, adds=True)
    all_gather(ranks, M / n, first=1)


def halving_doubling(n: int, ranks: Ranks) -> None:
    away = [2**i for i in reversed(range(n.bit_length() - 1))]
    for d in away:  # keep the half in which one's own part lies
        steps = [(r, r ^ d, [p for p in range(n) if p // d == (r ^ d) // d]) for r in range(n)]
        ranks.step(steps, part_bytes=M / n, adds=True)
    for d in reversed(away):
        steps = [(r, r ^ d, [p for p in range(n) if p // d == r // d]) for r in range(n)]
        ranks.step(steps, part_bytes=M / n, adds=False)


def recursive_doubling(n: int, ranks: Ranks) -> None:
    for d in (2**i for i in range(n.bit_length() - 1)):
        ranks.step([(r, r ^ d, range(n)) for r in range(n)], part_bytes=M / n, adds=True)


def binary_tree(n: int, ranks: Ranks) -> None:
    away = [2**i for i in range((n - 1).bit_length())]
    for d in away:
        ranks.step([(r, r - d, range(n)) for r in range(d, n, 2 * d)], part_bytes=M / n, adds=True)
    for d in reversed(away):
        ranks.step([(r, r + d, range(n)) for r in range(0, n - d, 2 * d)], part_bytes=M / n, adds=False)


@pytest.mark.parametrize(
    ("carried_out", "sizes"),
    [
        (ring, range(2, 9)),
        (halving_doubling, (2, 4, 8, 16)),
        (recursive_doubling, (2, 4, 8, 16)),
        (binary_tree, (2, 3, 4, 5, 8, 13)),
    ],
)
def test_all_reduce_takes_what_its_messages_take(
    carried_out: Callable[[int, Ranks], None], sizes: Iterable[int]
) -> None:
    for n in sizes:
        ranks = Ranks(n, lambda rank, _part: {rank})
        carried_out(n, ranks)
        expected = ranks.seconds(lambda _part, n=n: set(range(n)))  # type: ignore[misc]
        assert Flat(LINK, n, carried_out.__name__).seconds("all_reduce", M) == pytest.approx(expected)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_what_is_gathered_or_scattered_takes_what_its_messages_take(n: int) -> None:
    b = 700.0
    by_ring, by_rounds, pairwise = (Ranks(n, lambda r, part: {part} if r == part else set()) for _ in range(3))
    all_gather(by_ring, b)
    away = 1
    while away < n:  # what a rank holds doubles until the rest is short of that
        steps = [(r, (r - away) % n, [(r + i) % n for i in range(min(away, n - away))]) for r in range(n)]
        by_rounds.step(steps, part_bytes=b, adds=False)
        away *= 2
    for turn in range(1, n):
        pairwise.step([(r, (r + turn) % n, [r]) for r in range(n)], part_bytes=b, adds=False)
    for ranks, algorithm, op, size in (
        (by_ring, "ring", "gather_rows", b),
        (by_ring, "ring", "gather_lists", b),
        (by_rounds, "halving_doubling", "gather_rows", b),
        (pairwise, "ring", "scatter", (n - 1) * b),
    ):
        assert Flat(LINK, n, algorithm).seconds(op, size) == pytest.approx(ranks.seconds(lambda part: {part}))  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_broadcast_takes_what_its_messages_take(n: int) -> None:
    """Whole down one tree; or halves down a tree until each rank has its part, then an all-gather."""
    whole, parts = (Ranks(n, lambda rank, part: set() if rank else {part}) for _ in range(2))
    for d in (2**i for i in range((n - 1).bit_length())):
        whole.step([(r, r + d, range(n)) for r in range(d)], part_bytes=M / n, adds=False)
        half = n // 2 // d
        down = [(r, r + half, range(r + half, r + 2 * half)) for r in range(0, n, 2 * half)]
        parts.step(down, part_bytes=M / n, adds=False)
    parts.held = [[{part} if part == rank else set() for part in range(n)] for rank in range(n)]
    all_gather(parts, M / n)
    for ranks, algorithm in ((whole, "recursive_doubling"), (parts, "ring")):
        expected = ranks.seconds(lambda part: {part})
        assert Flat(LINK, n, algorithm).seconds("broadcast", M) == pytest.approx(expected)


def networks(n: int) -> list[Network]:
    """Return one of each kind for n = 2 m ranks."""
    nodes = [kind(intra=FAST, inter=LINK, ranks_per_node=2, num_nodes=n // 2) for kind in KINDS]
    flat = [Flat(LINK, n, algorithm) for algorithm in (*ALGORITHMS, PUBLISHED_TREE)]
    return [*flat, *nodes, Best((flat[0], flat[2]))]


def test_more_bytes_take_longer_and_half_of_an_all_reduce_gathers_its_parts() -> None:
    for op, n in itertools.product(OPS, (2, 4, 6, 16)):
        for network in networks(n):
            seconds = [network.seconds(op, size) for size in (0.0, 1.0, 1e3, 1e6, 1e9)]
            assert seconds == sorted(set(seconds))
            assert 0 <= gather_part(network, M) <= network.seconds("all_reduce", M)
    for algorithm, messages in (("ring", 7), ("halving_doubling", 3)):
        one = messages * LINK.alpha_s + 7 / 8 * M * LINK.beta_s
        assert gather_part(Flat(LINK, 8, algorithm), M) == pytest.approx(one)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16, 100])
def test_no_all_reduce_is_below_what_must_be_sent_but_the_published_tree(n: int) -> None:
    link = Link(0.0, 1e-9)
    bound = 2 * (n - 1) / n * M * link.beta_s
    for algorithm in ALGORITHMS:
        assert Flat(link, n, algorithm).seconds("all_reduce", M) >= bound * (1 - 1e-12)
    assert n == 2 or Flat(link, n, PUBLISHED_TREE).seconds("all_reduce", M) < bound


def test_a_fit_is_met_where_it_was_made() -> None:
    for algorithm, op, n in itertools.product(ALGORITHMS, OPS, (2, 3, 16)):
        link = scaled(9.7e-4, 2e-9, n, algorithm, op=op)
        assert Flat(link, n, algorithm).seconds(op, M) == pytest.approx(9.7e-4 + 2e-9 * M)
    ring_of_64 = Flat(scaled(9.72e-4, 1.97e-9, 16), 64)
    assert ring_of_64.seconds("all_reduce", 0.0) == pytest.approx(9.72e-4 * 126 / 30)


def test_the_best_of_networks_and_measured_tables_is_chosen_call_by_call() -> None:
    curve = Curve(sizes=(0.0, 1e6), seconds=(1e-3, 2e-3))
    table = LinkTable(world_size=64, collectives={"all_reduce": curve, "gather_rows": curve})
    few = Flat(LINK, 64, "recursive_doubling")
    best = Best((few, table))
    assert best.seconds("all_reduce", 100.0) == few.seconds("all_reduce", 100.0) < table.seconds("all_reduce", 100.0)
    assert best.seconds("all_reduce", 5e5) == pytest.approx(1.5e-3)
    assert gather_part(table, 64e5) == pytest.approx(1.1e-3)


# --- nodes ----------------------------------------------------------------------------------------------------------


def nodes(local: int, num_nodes: int, *, kind: type[NodeNetwork] = FlatOnNodes, rails: int = 1) -> NodeNetwork:
    return kind(intra=FAST, inter=SLOW, ranks_per_node=local, num_nodes=num_nodes, rails=rails)


def pairs(local: int, num_nodes: int) -> list[tuple[bool, int]]:
    """Every message of ranks that each send one to each other: whether it leaves its node, and its sender."""
    return [(a // local != b // local, a) for a, b in itertools.permutations(range(local * num_nodes), 2)]


@pytest.mark.parametrize("op", OPS)
def test_nodes_of_one_level_are_flat(op: Op) -> None:
    for kind in KINDS:
        assert nodes(6, 1, kind=kind).seconds(op, M) == pytest.approx(Flat(FAST, 6).seconds(op, M))
        assert nodes(1, 6, kind=kind).seconds(op, M) == pytest.approx(Flat(SLOW, 6).seconds(op, M))
        assert nodes(6, 1, kind=kind).bytes_by_level(op, M) == (pytest.approx(bytes_sent(op, M, 6)), 0.0)
        assert nodes(1, 6, kind=kind).bytes_by_level(op, M) == (0.0, pytest.approx(bytes_sent(op, M, 6)))
        assert nodes(1, 1, kind=kind).seconds(op, M) == 0.0


def test_a_hierarchy_has_the_known_closed_forms() -> None:
    """Dense and all-gather, with rails; and what is scattered leaves its node once."""
    g, n, rails = 4, 8, 2
    two = nodes(g, n, kind=Hierarchical, rails=rails)
    dense = 2 * (g - 1) * FAST.alpha_s + 2 * (g - 1) / g * M * FAST.beta_s
    dense += 2 * (n - 1) * SLOW.alpha_s + 2 * (n - 1) / n * M * SLOW.beta_s / rails
    assert two.seconds("all_reduce", M) == pytest.approx(dense)
    rows = (n - 1) * (SLOW.alpha_s + g * M * SLOW.beta_s / rails) + (g - 1) * (FAST.alpha_s + n * M * FAST.beta_s)
    assert two.seconds("gather_rows", M) == pytest.approx(rows)
    out = Hierarchical(intra=Link(0, 0), inter=Link(0, 1), ranks_per_node=g, num_nodes=n)
    assert out.seconds("scatter", g * n - 1) == pytest.approx(g * (n - 1) * g)


@pytest.mark.parametrize(("local", "num_nodes"), NODES)
def test_a_ring_is_as_slow_as_its_messages_between_nodes(local: int, num_nodes: int) -> None:
    n = local * num_nodes
    clock = [0.0] * n
    for _ in range(2 * (n - 1)):
        before = list(clock)
        for rank in range(n):
            link = FAST if (rank - 1) % n // local == rank // local else SLOW
            clock[rank] = max(before[rank - 1], before[rank]) + link.alpha_s + M / n * link.beta_s
    assert nodes(local, num_nodes).seconds("all_reduce", M) == pytest.approx(max(clock))
    assert nodes(local, num_nodes).seconds("gather_lists", M / n) == pytest.approx(max(clock) / 2)


@pytest.mark.parametrize(("local", "num_nodes"), NODES)
def test_what_is_scattered_shares_the_interfaces_of_a_node(local: int, num_nodes: int) -> None:
    leaving = [a for leaves, a in pairs(local, num_nodes) if leaves and a < local]  # of the first node
    for rails in (1, 2):
        expected = len(leaving) / local * SLOW.alpha_s + len(leaving) * M * SLOW.beta_s / rails
        expected += (local - 1) * (FAST.alpha_s + M * FAST.beta_s)
        network = nodes(local, num_nodes, rails=rails)
        assert network.seconds("scatter", (network.world_size - 1) * M) == pytest.approx(expected)


@pytest.mark.parametrize(("local", "num_nodes"), NODES)
def test_bytes_of_each_level_are_those_of_the_messages(local: int, num_nodes: int) -> None:
    n, network = local * num_nodes, nodes(local, num_nodes)
    crossing = sum(leaves for leaves, _ in pairs(local, num_nodes)) / n
    assert network.bytes_by_level("scatter", (n - 1) * M) == pytest.approx(((n - 1 - crossing) * M, crossing * M))
    edges = sum(rank // local != (rank + 1) % n // local for rank in range(n))  # of the ring
    for op, each in (("all_reduce", 2 * (n - 1) * M / n / n), ("gather_lists", (n - 1) * M / n)):
        assert network.bytes_by_level(op, M) == pytest.approx(((n - edges) * each, edges * each))  # type: ignore[arg-type]
    for op in OPS:
        assert sum(network.bytes_by_level(op, M)) == pytest.approx(bytes_sent(op, M, n))
        between = nodes(local, num_nodes, kind=Hierarchical).bytes_by_level(op, M)[1]
        assert between <= network.bytes_by_level(op, M)[1] * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_mean_in_two_levels_is_a_hierarchical_all_reduce_and_a_header(kind: type[NodeNetwork]) -> None:
    local, num_nodes, numel = 4, 8, 64_000
    two_level = micro.TwoLevel(reducer=micro.DenseReducer(), ranks_per_node=local)
    volume, network = volume_of(two_level, numel, local * num_nodes), nodes(local, num_nodes, kind=kind)
    header = Flat(FAST, local).seconds("gather_rows", 4 * (4 + num_nodes))
    hierarchy = nodes(local, num_nodes, kind=Hierarchical)
    assert seconds_of(volume, network) == pytest.approx(hierarchy.seconds("all_reduce", 4 * numel) + header)
    assert level_bytes(volume, network) == pytest.approx((volume.local_bytes, volume.between_bytes))
    dense = volume_of(micro.DenseReducer(), numel, local * num_nodes)
    assert volume.between_bytes == pytest.approx(level_bytes(dense, hierarchy)[1])


TWO_LEVEL = volume_of(micro.TwoLevel(reducer=micro.DenseReducer(), ranks_per_node=2), 100, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(-1.0, 0.0), "alpha_s .* got -1.0"),
        (lambda: Flat(LINK, 0), "world_size must be at least 1, got 0"),
        (lambda: Flat(LINK, 2, "rings"), "algorithm .* got 'rings'"),
        (lambda: nodes(2, 2, rails=3), r"rails must be in \[1, 2\]"),
        (lambda: nodes(2, 0), "world_size .* got 0"),
        (lambda: seconds_of(TWO_LEVEL, Flat(FAST, 4)), "two speeds"),
        (lambda: seconds_of(TWO_LEVEL, nodes(4, 1)), "2 ranks per node, the network 4"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
