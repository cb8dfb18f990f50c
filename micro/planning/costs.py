"""Networks as cost models: how long each collective takes among a number of ranks that reach each other alike."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, get_args

from micro.operations import OPS, Op
from micro.parts import Rule
from micro.planning.collectives import ALL_REDUCE, OTHERS, PUBLISHED, Algorithm, Link


class Network(Protocol):
    """A cost model of collectives among a fixed number of ranks; micro.planning.tables.LinkTable is one."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective; sizes are counted as in micro.planning.tables.LinkTable."""


@dataclass(frozen=True, slots=True)
class Flat:
    """Ranks that reach each other over equal links.

    The algorithm of the all-reduce decides how the other operations are done: all-gather and broadcast (a scatter, then
    an all-gather) by ring, or in log2 n rounds (Bruck) with any other algorithm; broadcast down one tree with
    binary_tree and recursive_doubling; lists and scatter always pairwise, as Comm sends them.

    Attributes:
        link: between any two ranks.
        world_size: number of ranks; one rank alone takes no time.
        algorithm: of the all-reduce.
        rule: 'published', double trees as their paper has them: see micro.planning.collectives.

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
            forms = PUBLISHED if self.rule == "published" else ALL_REDUCE
            return forms[self.algorithm](self.link, self.world_size, num_bytes)
        return OTHERS[op](self.link, self.world_size, num_bytes, self.algorithm)


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
