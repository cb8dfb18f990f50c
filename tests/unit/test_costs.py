"""The closed forms of collectives, against algorithms that are carried out message by message."""

import itertools
from collections.abc import Callable, Iterable

import pytest

import micro
from experiments.planning.costs import ALGORITHMS, Best, Flat, Link, Network
from experiments.planning.nodes import FlatOnNodes, Hierarchical, NodeNetwork, level_bytes, seconds_of
from experiments.planning.tables import Curve, LinkTable
from micro.comm.ranks import OPS, Op, bytes_sent
from micro.predicted_traffic import volume_of

LINK = Link(3e-5, 2e-9, 5e-10)
FAST, SLOW = Link(2e-6, 1e-11), Link(3e-5, 1e-9)
M = 1.2e6
NODES = [(2, 2), (4, 3), (3, 5)]  # ranks of a node, nodes
KINDS = (FlatOnNodes, Hierarchical)
Message = tuple[int, int, Iterable[int]]  # source, target, parts of the vector


class Ranks:
    """Clocks of ranks that send messages: each sends one at a time and receives one at a time, both at once.

    ``held[r]`` is what rank r knows: for each part of the vector, whose contributions are in it.
    """

    def __init__(self, n: int, held: Callable[[int, int], set[int]], part_bytes: float) -> None:
        self.n, self.clock, self.part_bytes = n, [0.0] * n, part_bytes
        self.held = [[held(rank, part) for part in range(n)] for rank in range(n)]

    def step(self, messages: Iterable[Message], *, adds: bool = False) -> None:
        """Send lists of parts at once; the receiver adds them to its own, or takes them."""
        before, held = list(self.clock), [list(parts) for parts in self.held]
        for source, target, parts in messages:
            size = self.part_bytes * len(list(parts))
            sent = LINK.alpha_s + size * LINK.beta_s
            arrived = max(before[source], before[target]) + sent + size * LINK.gamma_s * adds
            self.clock[target] = max(self.clock[target], arrived)
            self.clock[source] = max(self.clock[source], before[source] + sent)
            for part in parts:
                assert not adds or not self.held[target][part] & held[source][part], "added twice"
                self.held[target][part] = self.held[target][part] | held[source][part]

    def all_gather(self, first: int = 0) -> None:
        for turn in range(self.n - 1):
            self.step((r, (r + 1) % self.n, [(r + first - turn) % self.n]) for r in range(self.n))

    def seconds(self, whole: set[int] | None = None) -> float:
        """Return when the last rank is done; every rank then holds all of each part: ``whole``, or its owner's."""
        assert all(parts == [whole or {part} for part in range(self.n)] for parts in self.held)
        return max(self.clock)


def powers(n: int) -> list[int]:
    return [2**i for i in range((n - 1).bit_length())]


def ring(ranks: Ranks, n: int) -> None:
    for turn in range(n - 1):
        ranks.step([(r, (r + 1) % n, [(r - turn) % n]) for r in range(n)], adds=True)
    ranks.all_gather(first=1)


def halving_doubling(ranks: Ranks, n: int) -> None:
    for d in reversed(powers(n)):  # keep the half in which one's own part lies
        ranks.step([(r, r ^ d, [p for p in range(n) if p // d == (r ^ d) // d]) for r in range(n)], adds=True)
    for d in powers(n):
        ranks.step([(r, r ^ d, [p for p in range(n) if p // d == r // d]) for r in range(n)])


def recursive_doubling(ranks: Ranks, n: int) -> None:
    for d in powers(n):
        ranks.step([(r, r ^ d, range(n)) for r in range(n)], adds=True)


def binary_tree(ranks: Ranks, n: int) -> None:
    for d in powers(n):
        ranks.step([(r, r - d, range(n)) for r in range(d, n, 2 * d)], adds=True)
    for d in reversed(powers(n)):
        ranks.step([(r, r + d, range(n)) for r in range(0, n - d, 2 * d)])


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
    carried_out: Callable[[Ranks, int], None], sizes: Iterable[int]
) -> None:
    for n in sizes:
        ranks = Ranks(n, lambda rank, _part: {rank}, M / n)
        carried_out(ranks, n)
        expected = ranks.seconds(set(range(n)))
        assert Flat(LINK, n, carried_out.__name__).seconds("all_reduce", M) == pytest.approx(expected)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_what_is_gathered_or_scattered_takes_what_its_messages_take(n: int) -> None:
    b = 700.0
    by_ring, by_rounds, pairwise = (Ranks(n, lambda r, part: {part} if r == part else set(), b) for _ in range(3))
    by_ring.all_gather()
    for away in powers(n):  # what a rank holds doubles until the rest is short of that
        by_rounds.step([(r, (r - away) % n, [(r + i) % n for i in range(min(away, n - away))]) for r in range(n)])
    for turn in range(1, n):
        pairwise.step([(r, (r + turn) % n, [r]) for r in range(n)])
    cases: list[tuple[Ranks, str, Op, float]] = [
        (by_ring, "ring", "gather_rows", b),
        (by_ring, "ring", "gather_lists", b),
        (by_rounds, "halving_doubling", "gather_rows", b),
        (pairwise, "ring", "scatter", (n - 1) * b),
    ]
    for ranks, algorithm, op, size in cases:
        assert Flat(LINK, n, algorithm).seconds(op, size) == pytest.approx(ranks.seconds())


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_broadcast_takes_what_its_messages_take(n: int) -> None:
    """Whole down one tree; or halves down a tree until each rank has its part, then an all-gather."""
    whole, parts = (Ranks(n, lambda rank, part: set() if rank else {part}, M / n) for _ in range(2))
    for d in powers(n):
        whole.step([(r, r + d, range(n)) for r in range(d)])
        half = n // 2 // d
        parts.step([(r, r + half, range(r + half, r + 2 * half)) for r in range(0, n, 2 * half)])
    parts.held = [[{part} if part == rank else set() for part in range(n)] for rank in range(n)]
    parts.all_gather()
    for ranks, algorithm in ((whole, "recursive_doubling"), (parts, "ring")):
        assert Flat(LINK, n, algorithm).seconds("broadcast", M) == pytest.approx(ranks.seconds())


def networks(n: int) -> list[Network]:
    """Return one of each kind for n = 2 m ranks."""
    on_nodes = [kind(intra=FAST, inter=LINK, ranks_per_node=2, num_nodes=n // 2) for kind in KINDS]
    flat = [Flat(LINK, n, algorithm) for algorithm in ALGORITHMS]
    return [*flat, *on_nodes, Best((flat[0], flat[2]))]


def test_more_bytes_take_longer() -> None:
    for op, n in itertools.product(OPS, (2, 4, 6, 16)):
        for network in networks(n):
            seconds = [network.seconds(op, size) for size in (0.0, 1.0, 1e3, 1e6, 1e9)]
            assert seconds == sorted(set(seconds))


def test_the_best_of_networks_and_measured_tables_is_chosen_call_by_call() -> None:
    curve = Curve(sizes=(0.0, 1e6), seconds=(1e-3, 2e-3))
    table = LinkTable(world_size=64, collectives={"all_reduce": curve, "gather_rows": curve})
    few = Flat(LINK, 64, "recursive_doubling")
    best = Best((few, table))
    assert best.seconds("all_reduce", 100.0) == few.seconds("all_reduce", 100.0) < table.seconds("all_reduce", 100.0)
    assert best.seconds("all_reduce", 5e5) == pytest.approx(1.5e-3)


# --- nodes ----------------------------------------------------------------------------------------------------------


def nodes(local: int, num_nodes: int, kind: type[NodeNetwork] = FlatOnNodes, rails: int = 1) -> NodeNetwork:
    return kind(intra=FAST, inter=SLOW, ranks_per_node=local, num_nodes=num_nodes, rails=rails)


def leaving(local: int, num_nodes: int) -> list[int]:
    """Return the senders of messages that leave their node, where ranks send one to each other."""
    pairs = itertools.permutations(range(local * num_nodes), 2)
    return [source for source, target in pairs if source // local != target // local]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_one_level_are_flat(kind: type[NodeNetwork], op: Op) -> None:
    inside, between = nodes(6, 1, kind), nodes(1, 6, kind)
    assert inside.seconds(op, M) == pytest.approx(Flat(FAST, 6).seconds(op, M))
    assert between.seconds(op, M) == pytest.approx(Flat(SLOW, 6).seconds(op, M))
    assert inside.bytes_by_level(op, M) == (pytest.approx(bytes_sent(op, M, 6)), 0.0)
    assert between.bytes_by_level(op, M) == (0.0, pytest.approx(bytes_sent(op, M, 6)))
    assert nodes(1, 1, kind).seconds(op, M) == 0.0


def test_a_hierarchy_has_the_known_closed_forms() -> None:
    """Dense and all-gather, with rails; and what is scattered leaves its node once."""
    g, n, rails = 4, 8, 2
    two = nodes(g, n, Hierarchical, rails)
    dense = 2 * (g - 1) * FAST.alpha_s + 2 * (g - 1) / g * M * FAST.beta_s
    dense += 2 * (n - 1) * SLOW.alpha_s + 2 * (n - 1) / n * M * SLOW.beta_s / rails
    assert two.seconds("all_reduce", M) == pytest.approx(dense)
    rows = (n - 1) * (SLOW.alpha_s + g * M * SLOW.beta_s / rails) + (g - 1) * (FAST.alpha_s + n * M * FAST.beta_s)
    assert two.seconds("gather_rows", M) == pytest.approx(rows)
    out = Hierarchical(intra=Link(0, 0), inter=Link(0, 1), ranks_per_node=g, num_nodes=n)
    assert out.seconds("scatter", g * n - 1) == pytest.approx(g * (n - 1) * g)


@pytest.mark.parametrize(("local", "num_nodes"), NODES)
def test_times_and_bytes_on_nodes_equal_the_sum_of_messages(local: int, num_nodes: int) -> None:
    """A ring is as slow as its messages between nodes; what is scattered shares the interfaces of a node."""
    n, network = local * num_nodes, nodes(local, num_nodes)
    clock = [0.0] * n
    for _ in range(2 * (n - 1)):
        before = list(clock)
        for rank in range(n):
            link = FAST if (rank - 1) % n // local == rank // local else SLOW
            clock[rank] = max(before[rank - 1], before[rank]) + link.alpha_s + M / n * link.beta_s
    assert network.seconds("all_reduce", M) == pytest.approx(max(clock))
    assert network.seconds("gather_lists", M / n) == pytest.approx(max(clock) / 2)
    crossing, of_first = leaving(local, num_nodes), sum(rank < local for rank in leaving(local, num_nodes))
    for rails in (1, 2):
        expected = of_first / local * SLOW.alpha_s + of_first * M * SLOW.beta_s / rails
        expected += (local - 1) * (FAST.alpha_s + M * FAST.beta_s)
        assert nodes(local, num_nodes, rails=rails).seconds("scatter", (n - 1) * M) == pytest.approx(expected)
    each, edges = len(crossing) / n, sum(rank // local != (rank + 1) % n // local for rank in range(n))  # of the ring
    messages: list[tuple[Op, float, float, float]] = [  # bytes given, bytes of a message, within and between nodes
        ("scatter", (n - 1) * M, (n - 1 - each) * M, each * M),
        ("all_reduce", M, 2 * (n - 1) * M / n / n * (n - edges), 2 * (n - 1) * M / n / n * edges),
        ("gather_lists", M, (n - 1) * M / n * (n - edges), (n - 1) * M / n * edges),
    ]
    for op, size, within, between in messages:
        assert network.bytes_by_level(op, size) == pytest.approx((within, between))
    for op in OPS:
        assert sum(network.bytes_by_level(op, M)) == pytest.approx(bytes_sent(op, M, n))
        hierarchical = nodes(local, num_nodes, Hierarchical).bytes_by_level(op, M)[1]
        assert hierarchical <= network.bytes_by_level(op, M)[1] * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_mean_in_two_levels_is_a_hierarchical_all_reduce_and_a_header(kind: type[NodeNetwork]) -> None:
    local, num_nodes, numel = 4, 8, 64_000
    two_level = micro.TwoLevel(reducer=micro.DenseReducer(), ranks_per_node=local)
    volume, network = volume_of(two_level, numel, local * num_nodes), nodes(local, num_nodes, kind)
    header = Flat(FAST, local).seconds("gather_rows", 4 * (4 + num_nodes))
    dense = nodes(local, num_nodes, Hierarchical).seconds("all_reduce", 4 * numel)
    assert seconds_of(volume, network) == pytest.approx(dense + header)
    assert level_bytes(volume, network) == pytest.approx((volume.local_bytes, volume.between_bytes))
