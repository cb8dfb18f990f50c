"""Cost models of collectives on a network: seconds per message, per byte sent, and per byte added.

alpha is seconds per message, beta seconds per byte sent, gamma seconds per byte added; n is the number of ranks. A rank
sends and receives one message at a time. An all-reduce of m bytes takes alpha, and m times:

    ring                 2 (n-1) alpha    2 (n-1)/n beta + (n-1)/n gamma
    halving_doubling     2 log2 n alpha   2 (n-1)/n beta + (n-1)/n gamma
    double_tree          2 log2 n alpha   2 beta + gamma
    binary_tree          2 log2 n alpha   log2 n (2 beta + gamma)
    recursive_doubling   log2 n alpha     log2 n (beta + gamma)

Source: Shi et al., MG-WFBP, TPDS 2021, arXiv 1912.09268, its table of all-reduce algorithms. Differences: its slope of
double binary trees, beta + gamma, is below the minimum of any all-reduce with three or more ranks, 2 (n-1)/n beta; here
it is 2 beta + gamma. For other numbers of ranks, the rounds are those of the next power of two; further costs of
folding in the remaining ranks are ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from micro.comm.ranks import Op


@dataclass(frozen=True, slots=True)
class Link:
    """The costs of a message from one rank to another.

    Attributes:
        alpha_s: seconds per message, whatever its length.
        beta_s: seconds per byte sent.
        gamma_s: seconds per byte to add received data.

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


class Network(Protocol):
    """A cost model of collectives among a fixed number of ranks; experiments.planning.tables.LinkTable is one."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective; sizes as in experiments.planning.tables.LinkTable."""


class Work(NamedTuple):
    """A collective's load on a link: number of sequential messages, and multiples of its size sent and added."""

    messages: int
    share: float
    sent: int = 1
    added: int = 0


def rounds(n: int) -> int:
    """Return ceil(log2 n)."""
    return (n - 1).bit_length()


ALL_REDUCE: Mapping[str, Callable[[int], Work]] = {
    "ring": lambda n: Work(2 * (n - 1), (n - 1) / n, sent=2, added=1),
    "halving_doubling": lambda n: Work(2 * rounds(n), (n - 1) / n, sent=2, added=1),
    "double_tree": lambda n: Work(2 * rounds(n), 1, sent=2, added=1),
    "binary_tree": lambda n: Work(2 * rounds(n), rounds(n), sent=2, added=1),
    "recursive_doubling": lambda n: Work(rounds(n), rounds(n), added=1),
}
ALGORITHMS = tuple(ALL_REDUCE)


def work_of(op: Op, n: int, algorithm: str) -> Work:
    """Return the load of a collective of n ranks on each link, with the all-reduce by ``algorithm``.

    All-gathers use a ring, or with any other algorithm log2 n rounds (Bruck). A broadcast is a scatter, then an
    all-gather; with binary_tree and recursive_doubling, a tree. An all-to-all sends pairwise.
    """
    if op == "all_reduce":
        return ALL_REDUCE[algorithm](n)
    if op == "scatter":
        return Work(n - 1, 1)
    if op == "broadcast" and algorithm in ("binary_tree", "recursive_doubling"):
        return Work(rounds(n), rounds(n))
    gathering = n - 1 if algorithm == "ring" else rounds(n)
    if op == "broadcast":
        return Work(rounds(n) + gathering, (n - 1) / n, sent=2)
    return Work(gathering, n - 1)


@dataclass(frozen=True, slots=True)
class Flat:
    """Ranks with equal links between all of them.

    Attributes:
        world_size: number of ranks; a single rank takes no time.
        algorithm: of the all-reduce, one of ALGORITHMS; see `work_of`.

    Raises:
        ValueError: no such algorithm, or no ranks.
    """

    link: Link
    world_size: int
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if self.algorithm not in ALL_REDUCE:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got '{self.algorithm}'")

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective."""
        if self.world_size == 1:
            return 0.0
        link, work = self.link, work_of(op, self.world_size, self.algorithm)
        byte_s = work.sent * link.beta_s + work.added * link.gamma_s
        return work.messages * link.alpha_s + work.share * num_bytes * byte_s


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest of several networks for each call, like a library that chooses an algorithm by size."""

    networks: tuple[Network, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.networks[0].world_size

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective."""
        return min(network.seconds(op, num_bytes) for network in self.networks)


def scaled(alpha_s: float, beta_s: float, fitted_at: int, algorithm: str = "ring", *, op: Op = "all_reduce") -> Link:
    """Return the link on which ``fitted_at`` ranks take alpha_s + beta_s * bytes, to extend a fit to other numbers.

    gamma is 0: the cost of adding is part of beta.
    """
    work = work_of(op, fitted_at, algorithm)
    return Link(alpha_s / work.messages, beta_s / (work.share * work.sent))
