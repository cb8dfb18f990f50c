"""How long the collectives take: closed forms in the start-up, the transfer and the addition of a message.

alpha is seconds per message, beta seconds per byte sent, gamma seconds per byte added. m is the bytes of a whole
vector, b those that one rank contributes, n the number of ranks. A rank sends one message at a time and receives one.

All-reduce of m bytes:

    ring                 2 (n-1) alpha    2 (n-1)/n beta + (n-1)/n gamma
    halving_doubling     2 log2 n alpha   2 (n-1)/n beta + (n-1)/n gamma
    double_tree          2 log2 n alpha   2 beta + gamma; published: beta + gamma
    binary_tree          2 log2 n alpha   log2 n (2 beta + gamma)
    recursive_doubling   log2 n alpha     log2 n (beta + gamma)

Source: Shi et al., MG-WFBP, TPDS 2021, arXiv 1912.09268, its table of all-reduce algorithms. Differences: its slope of
double binary trees, beta + gamma, is below what any all-reduce needs from three ranks on, 2 (n-1)/n beta; here it is
2 beta + gamma unless ``rule`` is 'published'. Numbers of ranks that are no power of two take as many rounds as the next
power; what folding in the ranks left over adds beyond that is left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from micro.operations import OPS, Op
from micro.parts import Rule

Algorithm = Literal["ring", "halving_doubling", "double_tree", "binary_tree", "recursive_doubling"]


class Network(Protocol):
    """A cost model of collectives among a fixed number of ranks; micro.planning.tables.LinkTable is one."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective; sizes are counted as in micro.planning.tables.LinkTable."""


@dataclass(frozen=True, slots=True)
class Link:
    """What it costs to send a message from one rank to another.

    Attributes:
        alpha_s: seconds per message, whatever its length.
        beta_s: seconds per byte sent.
        gamma_s: seconds per byte to add what was received.

    Raises:
        ValueError: one of them is negative.
    """

    alpha_s: float
    beta_s: float
    gamma_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s", "gamma_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} of a link must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Flat:
    """Ranks that reach each other over equal links.

    The algorithm of the all-reduce decides how the other operations are done: all-gather and broadcast (a scatter, then
    an all-gather) by ring, or in log2 n rounds (Bruck) with any other algorithm; broadcast down one tree with
    binary_tree and recursive_doubling; lists and scatter always pairwise, as micro.Comm sends them.

    Attributes:
        link: between any two ranks.
        world_size: number of ranks; one rank alone takes no time.
        algorithm: of the all-reduce.
        rule: 'published', double trees as their paper has them: see this module's text.

    Raises:
        ValueError: no such algorithm or rule, 'published' without double trees, or no ranks.
    """

    link: Link
    world_size: int
    algorithm: Algorithm = "ring"
    rule: Rule = "repaired"

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if self.algorithm not in get_args(Algorithm):
            raise ValueError(f"algorithm must be one of {', '.join(get_args(Algorithm))}, got '{self.algorithm}'")
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule must be one of {', '.join(get_args(Rule))}, got '{self.rule}'")
        if self.rule == "published" and self.algorithm != "double_tree":
            raise ValueError(f"rule published is for double_tree, got algorithm '{self.algorithm}': leave rule out")

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective; see Network."""
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got '{op}'")
        if self.world_size == 1:
            return 0.0
        if op == "all_reduce":
            forms = _PUBLISHED if self.rule == "published" else _ALL_REDUCE
            return forms[self.algorithm](self.link, self.world_size, num_bytes)
        return _OTHERS[op](self.link, self.world_size, num_bytes, self.algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchical:
    """Nodes of several ranks each: data that must leave a node leaves it once.

    An all-reduce is a reduce-scatter in the node, all-reduces of equal parts across nodes, an all-gather in the node;
    all other operations are divided in the same way: each rank of a node talks to the ranks of the same local rank in
    other nodes. So every operation has a part within the node and a part across nodes, and the ranks of a node share
    its rails.

    Attributes:
        intra: within a node, by ring.
        inter: across nodes; beta_s is of one rail.
        ranks_per_node, num_nodes: at least 1.
        rails: network interfaces of a node that carry traffic side by side, at most one for each rank.
        algorithm: across nodes.

    Raises:
        ValueError: a number out of range, or no such algorithm.
    """

    intra: Link
    inter: Link
    ranks_per_node: int
    num_nodes: int
    rails: int = 1
    algorithm: Algorithm = "ring"

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "num_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.rails <= self.ranks_per_node:
            raise ValueError(f"rails must be in [1, {self.ranks_per_node}], the ranks of a node, got {self.rails}")
        _ = self._across

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks_per_node * self.num_nodes

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective; see Network."""
        within, across = self._shares(op)
        inside = Flat(self.intra, self.ranks_per_node).seconds(op, within * num_bytes)
        return inside + self._across.seconds(op, across * num_bytes)

    @property
    def _across(self) -> Flat:
        """The nodes as ranks: sizes are what all ranks of a node send together, over all rails; each adds its part."""
        link = Link(self.inter.alpha_s, self.inter.beta_s / self.rails, self.inter.gamma_s / self.ranks_per_node)
        return Flat(link, self.num_nodes, self.algorithm)

    def _shares(self, op: Op) -> tuple[float, float]:
        """Return the factors on an operation's bytes: for a rank within its node, and for a node across nodes."""
        local, nodes = self.ranks_per_node, self.num_nodes
        if op in ("gather_rows", "gather_lists"):
            return nodes, local
        if op == "scatter":  # first to the rank of the receiver's place, then across
            others = max(self.world_size - 1, 1)
            return (local - 1) * nodes / others, (nodes - 1) * local**2 / others
        return 1, 1


@dataclass(frozen=True, slots=True)
class Affine:
    """An all-reduce of a + b m seconds, as papers fit it for one number of ranks.

    Other operations are computed from the link on which an all-reduce by ``algorithm`` would fit these numbers.

    Attributes:
        alpha_s, beta_s: a in seconds, b in seconds per byte.
        world_size: number of ranks of the fit.
    """

    alpha_s: float
    beta_s: float
    world_size: int
    algorithm: Algorithm = "ring"

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective; see Network."""
        if self.world_size == 1:
            return 0.0
        if op == "all_reduce":
            return self.alpha_s + self.beta_s * num_bytes
        link = scaled(self.alpha_s, self.beta_s, self.world_size, self.algorithm)
        return Flat(link, self.world_size, self.algorithm).seconds(op, num_bytes)


@dataclass(frozen=True, slots=True)
class Best:
    """For each call the fastest of several networks, like a library that chooses its algorithm by the size."""

    networks: tuple[Network, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.networks[0].world_size

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective; see Network."""
        return min(network.seconds(op, num_bytes) for network in self.networks)


def best_of(networks: Iterable[Network]) -> Best:
    """Return the network that is, call by call, the fastest of ``networks``.

    Raises:
        ValueError: none are given, or they differ in their number of ranks.
    """
    given = tuple(networks)
    if len({network.world_size for network in given}) != 1:
        sizes = ", ".join(str(network.world_size) for network in given) or "none"
        raise ValueError(f"networks to choose from must have one world_size, got {sizes}")
    return Best(given)


def scaled(
    alpha_s: float,
    beta_s: float,
    fitted_at: int,
    algorithm: Algorithm = "ring",
    *,
    op: Op = "all_reduce",
    rule: Rule = "repaired",
) -> Link:
    """Return the link on which ``fitted_at`` ranks take alpha_s + beta_s * bytes, to extend a fit to any number.

    gamma is 0: the cost of adding is part of beta.

    Args:
        op: what was fitted; sizes as in micro.planning.tables.LinkTable.

    Raises:
        ValueError: fewer than two ranks, which send nothing.
    """
    if fitted_at < 2:
        raise ValueError(f"fitted_at must be at least 2 ranks, got {fitted_at}")
    messages = Flat(Link(1.0, 0.0), fitted_at, algorithm, rule).seconds(op, 1.0)
    bytes_sent = Flat(Link(0.0, 1.0), fitted_at, algorithm, rule).seconds(op, 1.0)
    return Link(alpha_s / messages, beta_s / bytes_sent)


def gather_part(network: Network, num_bytes: float) -> float:
    """Return the seconds of an all-reduce's second half: every rank has the sum of its part, and all gather the parts.

    With `reduce_part` it makes up the all-reduce; exactly, where that is by ring or by halving and doubling.
    """
    whole = network.seconds("all_reduce", num_bytes)
    return min(whole, network.seconds("gather_rows", num_bytes / network.world_size))


def reduce_part(network: Network, num_bytes: float) -> float:
    """Return the seconds of an all-reduce's first half: every rank gets the sum of its part."""
    return network.seconds("all_reduce", num_bytes) - gather_part(network, num_bytes)


def _rounds(n: int) -> int:
    """Return ceil(log2 n)."""
    return (n - 1).bit_length()


def _ring(link: Link, n: int, m: float) -> float:
    return 2 * (n - 1) * link.alpha_s + (n - 1) / n * m * (2 * link.beta_s + link.gamma_s)


def _halving_doubling(link: Link, n: int, m: float) -> float:
    return 2 * _rounds(n) * link.alpha_s + (n - 1) / n * m * (2 * link.beta_s + link.gamma_s)


def _double_tree(link: Link, n: int, m: float) -> float:
    return 2 * _rounds(n) * link.alpha_s + m * (2 * link.beta_s + link.gamma_s)


def _published_double_tree(link: Link, n: int, m: float) -> float:
    return 2 * _rounds(n) * link.alpha_s + m * (link.beta_s + link.gamma_s)


def _binary_tree(link: Link, n: int, m: float) -> float:
    return _rounds(n) * (2 * link.alpha_s + m * (2 * link.beta_s + link.gamma_s))


def _recursive_doubling(link: Link, n: int, m: float) -> float:
    return _rounds(n) * (link.alpha_s + m * (link.beta_s + link.gamma_s))


_ALL_REDUCE: Mapping[str, Callable[[Link, int, float], float]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "double_tree": _double_tree,
    "binary_tree": _binary_tree,
    "recursive_doubling": _recursive_doubling,
}
_PUBLISHED = {"double_tree": _published_double_tree}


def _all_gather(link: Link, n: int, b: float, algorithm: str) -> float:
    messages = n - 1 if algorithm == "ring" else _rounds(n)
    return messages * link.alpha_s + (n - 1) * b * link.beta_s


def _pairwise_lists(link: Link, n: int, b: float, _algorithm: str) -> float:
    return (n - 1) * (link.alpha_s + b * link.beta_s)


def _pairwise_scatter(link: Link, n: int, num_bytes: float, _algorithm: str) -> float:
    return (n - 1) * link.alpha_s + num_bytes * link.beta_s


def _broadcast(link: Link, n: int, m: float, algorithm: str) -> float:
    if algorithm in ("binary_tree", "recursive_doubling"):
        return _rounds(n) * (link.alpha_s + m * link.beta_s)
    scatter = _rounds(n) * link.alpha_s + (n - 1) / n * m * link.beta_s
    return scatter + _all_gather(link, n, m / n, algorithm)


_OTHERS: Mapping[str, Callable[[Link, int, float, str], float]] = {
    "gather_rows": _all_gather,
    "gather_lists": _pairwise_lists,
    "scatter": _pairwise_scatter,
    "broadcast": _broadcast,
}
