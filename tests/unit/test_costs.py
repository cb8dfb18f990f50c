"""The closed forms, against algorithms that are carried out message by message."""

import itertools
import math
from collections.abc import Callable, Iterable

import pytest

from micro.operations import OPS, Op
from micro.planning.collectives import Link
from micro.planning.costs import Affine, Best, Flat, Network, best_of, gather_part, reduce_part, scaled
from micro.planning.nodes import Hierarchical
from micro.planning.tables import LinkTable

LINK = Link(3e-5, 2e-9, 5e-10)
ALGORITHMS = ("ring", "halving_doubling", "double_tree", "binary_tree", "recursive_doubling")
M = 1.2e6


class Ranks:
    """Clocks of ranks that send messages: each sends one at a time and receives one at a time, both at once.

    ``held[r]`` is what rank r knows: for each part of the vector, whose contributions are in it.
    """

    def __init__(self, world_size: int, held: Callable[[int, int], set[int]]) -> None:
        self.n = world_size
        self.clock = [0.0] * world_size
        self.held = [[held(rank, part) for part in range(world_size)] for rank in range(world_size)]

    def step(self, messages: Iterable[tuple[int, int, Iterable[int]]], *, part_bytes: float, adds: bool) -> None:
        """Send lists of parts at once; the receiver adds them to its own, or takes them."""
        before, held = list(self.clock), [list(parts) for parts in self.held]
        for source, target, parts in messages:
            size = part_bytes * len(list(parts))
            passed = LINK.alpha_s + size * (LINK.beta_s + (LINK.gamma_s if adds else 0.0))
            arrived = max(before[source], before[target]) + passed
            self.clock[target] = max(self.clock[target], arrived)
            self.clock[source] = max(self.clock[source], before[source] + LINK.alpha_s + size * LINK.beta_s)
            for part in parts:
                if adds:
                    assert not self.held[target][part] & held[source][part], "added twice"
                self.held[target][part] = self.held[target][part] | held[source][part]

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return max(self.clock)

    def all_know(self, everybody: Callable[[int], set[int]]) -> bool:
        """Return whether every rank holds ``everybody(part)`` of each part."""
        return all(parts == [everybody(part) for part in range(self.n)] for parts in self.held)


def summed(n: int) -> Ranks:
    """Return ranks that each hold a vector of their own, to be added up."""
    return Ranks(n, lambda rank, _part: {rank})


def gathered(n: int) -> Ranks:
    """Return ranks that each hold one part, to be gathered."""
    return Ranks(n, lambda rank, part: {part} if rank == part else set())


def ring(n: int) -> Ranks:
    ranks = summed(n)
    for adds, first in ((True, 0), (False, 1)):
        for turn in range(n - 1):
            steps = [(r, (r + 1) % n, [(r + first - turn) % n]) for r in range(n)]
            ranks.step(steps, part_bytes=M / n, adds=adds)
    return ranks


def halving_doubling(n: int) -> Ranks:
    ranks = summed(n)
    distances = [2**i for i in reversed(range(n.bit_length() - 1))]
    for away in distances:  # keep the half in which one's own part lies
        steps = [(r, r ^ away, [p for p in range(n) if _block(p, away) == _block(r ^ away, away)]) for r in range(n)]
        ranks.step(steps, part_bytes=M / n, adds=True)
    for away in reversed(distances):
        steps = [(r, r ^ away, [p for p in range(n) if _block(p, away) == _block(r, away)]) for r in range(n)]
        ranks.step(steps, part_bytes=M / n, adds=False)
    return ranks


def _block(part: int, away: int) -> int:
    return part // away


def recursive_doubling(n: int) -> Ranks:
    ranks = summed(n)
    for away in (2**i for i in range(n.bit_length() - 1)):
        ranks.step([(r, r ^ away, range(n)) for r in range(n)], part_bytes=M / n, adds=True)
    return ranks


def binary_tree(n: int) -> Ranks:
    ranks = summed(n)
    distances = [2**i for i in range((n - 1).bit_length())]
    for away in distances:
        up = [(r, r - away, range(n)) for r in range(away, n, 2 * away)]
        ranks.step(up, part_bytes=M / n, adds=True)
    for away in reversed(distances):
        down = [(r, r + away, range(n)) for r in range(0, n - away, 2 * away)]
        ranks.step(down, part_bytes=M / n, adds=False)
    return ranks


@pytest.mark.parametrize(
    ("carried_out", "sizes"),
    [(ring, range(2, 9)), (halving_doubling, (2, 4, 8, 16)), (recursive_doubling, (2, 4, 8, 16))],
)
def test_all_reduce_takes_what_its_messages_take(carried_out: Callable[[int], Ranks], sizes: Iterable[int]) -> None:
    """Every rank gets the sum of all, in the seconds of the closed form."""
    for n in sizes:
        ranks = carried_out(n)
        assert ranks.all_know(lambda _part, n=n: set(range(n)))
        assert Flat(LINK, n, carried_out.__name__).seconds("all_reduce", M) == pytest.approx(ranks.seconds)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13])
def test_a_tree_takes_what_its_messages_take(n: int) -> None:
    """Whole vectors up one tree and down again."""
    ranks = binary_tree(n)
    assert ranks.all_know(lambda _part: set(range(n)))
    assert Flat(LINK, n, "binary_tree").seconds("all_reduce", M) == pytest.approx(ranks.seconds)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_all_gathers_take_what_their_messages_take(n: int) -> None:
    """By ring; and in ceil(log2 n) rounds, in which what a rank holds doubles until the rest is short of that."""
    b = 700.0
    by_ring, by_rounds = gathered(n), gathered(n)
    for turn in range(n - 1):
        by_ring.step([(r, (r + 1) % n, [(r - turn) % n]) for r in range(n)], part_bytes=b, adds=False)
    away = 1
    while away < n:
        count = min(away, n - away)
        steps = [(r, (r - away) % n, [(r + i) % n for i in range(count)]) for r in range(n)]
        by_rounds.step(steps, part_bytes=b, adds=False)
        away *= 2
    for ranks, algorithm in ((by_ring, "ring"), (by_rounds, "halving_doubling")):
        assert ranks.all_know(lambda part: {part})
        for op in ("gather_rows", "gather_lists"):
            assert Flat(LINK, n, algorithm).seconds(op, b) == pytest.approx(ranks.seconds)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_pairwise_operations_take_what_their_messages_take(n: int) -> None:
    """In turn t every rank sends to the one t places on."""
    b, ranks = 700.0, gathered(n)
    for turn in range(1, n):
        ranks.step([(r, (r + turn) % n, [r]) for r in range(n)], part_bytes=b, adds=False)
    assert ranks.all_know(lambda part: {part})
    assert Flat(LINK, n).seconds("scatter", (n - 1) * b) == pytest.approx(ranks.seconds)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 11])
def test_a_broadcast_down_one_tree_takes_what_its_messages_take(n: int) -> None:
    """The whole vector in every message."""
    ranks = Ranks(n, lambda rank, part: {part} if rank == 0 else set())
    for away in (2**i for i in range((n - 1).bit_length())):
        down = [(r, r + away, range(n)) for r in range(away) if r + away < n]
        ranks.step(down, part_bytes=M / n, adds=False)
    assert ranks.all_know(lambda part: {part})
    assert Flat(LINK, n, "recursive_doubling").seconds("broadcast", M) == pytest.approx(ranks.seconds)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_broadcast_by_parts_takes_what_its_messages_take(n: int) -> None:
    """Halves down a tree, until each rank has its part; then an all-gather by ring."""
    ranks = Ranks(n, lambda rank, part: {part} if rank == 0 else set())
    away = n // 2
    while away:
        down = [(r, r + away, range(r + away, r + 2 * away)) for r in range(0, n, 2 * away)]
        ranks.step(down, part_bytes=M / n, adds=False)
        away //= 2
    ranks.held = [[{part} if part == rank else set() for part in range(n)] for rank in range(n)]
    for turn in range(n - 1):
        ranks.step([(r, (r + 1) % n, [(r - turn) % n]) for r in range(n)], part_bytes=M / n, adds=False)
    assert Flat(LINK, n).seconds("broadcast", M) == pytest.approx(ranks.seconds)


def networks(n: int) -> list[Network]:
    """Return one of each kind for n = 2 m ranks."""
    return [
        *(Flat(LINK, n, algorithm) for algorithm in ALGORITHMS),
        Flat(LINK, n, "double_tree", "published"),
        Hierarchical(intra=Link(1e-6, 1e-11), inter=LINK, ranks_per_node=2, num_nodes=n // 2),
        Affine(1e-3, 1e-9, n),
        Best((Flat(LINK, n), Flat(LINK, n, "double_tree"))),
    ]


@pytest.mark.parametrize("op", OPS)
def test_more_bytes_take_longer(op: Op) -> None:
    """On every network."""
    for kind in range(len(networks(2))):
        for n in (2, 4, 6, 16):
            seconds = [networks(n)[kind].seconds(op, size) for size in (0.0, 1.0, 1e3, 1e6, 1e9)]
            assert seconds == sorted(seconds)
            assert len(set(seconds)) == len(seconds)


def test_one_rank_takes_no_time() -> None:
    """There is nobody to send to."""
    for op in OPS:
        for alone in (Flat(LINK, 1), Affine(1.0, 1.0, 1)):
            assert alone.seconds(op, M) == 0.0
        single = Hierarchical(intra=LINK, inter=LINK, ranks_per_node=1, num_nodes=1)
        assert single.seconds(op, M) == 0.0


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16, 100])
def test_no_all_reduce_is_below_what_must_be_sent(n: int) -> None:
    """Each rank has to send and receive 2 (n-1)/n of the vector."""
    bound = 2 * (n - 1) / n * M * LINK.beta_s
    for algorithm in ALGORITHMS:
        assert Flat(LINK, n, algorithm).seconds("all_reduce", M) >= bound


@pytest.mark.parametrize("n", [4, 16, 256])
def test_the_published_double_tree_is_below_what_must_be_sent(n: int) -> None:
    """Which is why it has a rule to its name; ours is not."""
    without_adding = Link(0.0, 1e-9)
    bound = 2 * (n - 1) / n * M * without_adding.beta_s
    assert Flat(without_adding, n, "double_tree", "published").seconds("all_reduce", M) < bound
    assert Flat(without_adding, n, "double_tree").seconds("all_reduce", M) >= bound


@pytest.mark.parametrize("op", OPS)
def test_a_hierarchy_of_one_level_is_flat(op: Op) -> None:
    """One node, or one rank a node."""
    inside, outside = Link(2e-6, 1e-11, 3e-11), LINK
    one_node = Hierarchical(intra=inside, inter=outside, ranks_per_node=6, num_nodes=1)
    assert one_node.seconds(op, M) == pytest.approx(Flat(inside, 6).seconds(op, M))
    for algorithm in ALGORITHMS:
        ones = Hierarchical(intra=inside, inter=outside, ranks_per_node=1, num_nodes=6, algorithm=algorithm)
        assert ones.seconds(op, M) == pytest.approx(Flat(outside, 6, algorithm).seconds(op, M))


def test_a_hierarchy_has_the_known_closed_forms() -> None:
    """Dense and all-gather, with rails; and a node sends each byte out once."""
    inside, outside, g, n, rails = Link(2e-6, 1e-11), Link(3e-5, 1e-9), 4, 8, 2
    two = Hierarchical(intra=inside, inter=outside, ranks_per_node=g, num_nodes=n, rails=rails)
    dense = 2 * (g - 1) * inside.alpha_s + 2 * (g - 1) / g * M * inside.beta_s
    dense += 2 * (n - 1) * outside.alpha_s + 2 * (n - 1) / n * M * outside.beta_s / rails
    assert two.seconds("all_reduce", M) == pytest.approx(dense)
    rows = (n - 1) * (outside.alpha_s + g * M * outside.beta_s / rails)
    rows += (g - 1) * (inside.alpha_s + n * M * inside.beta_s)
    assert two.seconds("gather_rows", M) == pytest.approx(rows)
    out = Hierarchical(intra=Link(0, 0), inter=Link(0, 1), ranks_per_node=g, num_nodes=n)
    leaving = g * (n - 1) * g  # parts that ranks of a node have for ranks of others
    assert out.seconds("scatter", g * n - 1) == pytest.approx(leaving)


def test_a_fit_is_met_where_it_was_made() -> None:
    """Whatever was fitted, with which algorithm; from there it scales."""
    for algorithm, op, n in itertools.product(ALGORITHMS, OPS, (2, 3, 16)):
        link = scaled(9.7e-4, 2e-9, n, algorithm, op=op)
        assert Flat(link, n, algorithm).seconds(op, M) == pytest.approx(9.7e-4 + 2e-9 * M)
    link = scaled(9.72e-4, 1.97e-9, 16)
    assert link.alpha_s == pytest.approx(9.72e-4 / 30)
    assert link.beta_s == pytest.approx(1.97e-9 * 16 / 30)
    assert Flat(link, 64).seconds("all_reduce", 0.0) == pytest.approx(9.72e-4 * 126 / 30)


def test_an_affine_all_reduce_prices_the_rest_by_its_link() -> None:
    """Which is that of a ring."""
    fitted = Affine(1e-3, 1e-9, 8)
    same = Flat(scaled(1e-3, 1e-9, 8), 8)
    for op in OPS:
        assert fitted.seconds(op, M) == pytest.approx(same.seconds(op, M))


def test_the_halves_of_an_all_reduce_make_it_up() -> None:
    """An all-gather of the parts, and the rest, which by ring is the reduce-scatter."""
    for network in networks(8):
        whole = network.seconds("all_reduce", M)
        assert gather_part(network, M) + reduce_part(network, M) == pytest.approx(whole)
        assert 0 <= gather_part(network, M) <= whole
    for algorithm, messages in (("ring", 7), ("halving_doubling", 3)):
        one = messages * LINK.alpha_s + 7 / 8 * M * LINK.beta_s
        assert gather_part(Flat(LINK, 8, algorithm), M) == pytest.approx(one)
        assert reduce_part(Flat(LINK, 8, algorithm), M) == pytest.approx(one + 7 / 8 * M * LINK.gamma_s)


def test_the_best_is_chosen_call_by_call() -> None:
    """Few rounds for short messages, all bandwidth for long ones."""
    few, wide = Flat(LINK, 64, "recursive_doubling"), Flat(LINK, 64, "ring")
    best = best_of([few, wide])
    assert best.seconds("all_reduce", 100.0) == few.seconds("all_reduce", 100.0) < wide.seconds("all_reduce", 100.0)
    assert best.seconds("all_reduce", 1e9) == wide.seconds("all_reduce", 1e9) < few.seconds("all_reduce", 1e9)
    with pytest.raises(ValueError, match="one world_size, got 2, 4"):
        best_of([Flat(LINK, 2), Flat(LINK, 4)])
    with pytest.raises(ValueError, match="one world_size, got none"):
        best_of([])


def test_a_measured_table_is_a_network() -> None:
    """What holds of models holds of measurements."""
    curve = {"sizes": [0.0, 1e6], "seconds": [1e-3, 2e-3]}
    table = LinkTable.parse(
        {"format": LinkTable.format, "world_size": 4, "collectives": {"all_reduce": curve, "gather_rows": curve}}
    )
    assert best_of([table, Flat(Link(1.0, 1.0), 4)]).seconds("all_reduce", 5e5) == pytest.approx(1.5e-3)
    assert gather_part(table, 4e5) == pytest.approx(1.1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1.0, 0.0), "alpha_s of a link must not be negative, got -1.0"),
        (lambda: Link(1.0, math.nan), "beta_s of a link must not be negative, got nan"),
        (lambda: Flat(LINK, 0), "world_size must be at least 1, got 0"),
        (lambda: Flat(LINK, 2, "rings"), "algorithm must be one of ring, .*, got 'rings'"),
        (lambda: Flat(LINK, 2, "double_tree", "paper"), "rule must be one of repaired, published, got 'paper'"),
        (lambda: Flat(LINK, 2, rule="published"), "rule published is for double_tree, got algorithm 'ring'"),
        (lambda: Flat(LINK, 2).seconds("reduce", 1.0), "op must be one of all_reduce, .*, got 'reduce'"),
        (lambda: scaled(1.0, 1.0, 1), "fitted_at must be at least 2 ranks, got 1"),
        (
            lambda: Hierarchical(intra=LINK, inter=LINK, ranks_per_node=2, num_nodes=2, rails=3),
            r"rails must be in \[1, 2\]",
        ),
        (lambda: Hierarchical(intra=LINK, inter=LINK, ranks_per_node=0, num_nodes=2), "ranks_per_node must be at leas"),
        (
            lambda: Hierarchical(intra=LINK, inter=LINK, ranks_per_node=2, num_nodes=2, algorithm="x"),
            "algorithm must be one of",
        ),
    ],
)
def test_mistakes_are_told(make: Callable[[], object], message: str) -> None:
    """In one line with what was given and what is allowed."""
    with pytest.raises(ValueError, match=message):
        make()
