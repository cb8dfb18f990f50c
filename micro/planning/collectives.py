"""How long a collective takes: closed forms in the start-up, the transfer and the addition of a message.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["ring", "halving_doubling", "double_tree", "binary_tree", "recursive_doubling"]


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


def rounds(n: int) -> int:
    """Return ceil(log2 n)."""
    return (n - 1).bit_length()


def _ring(link: Link, n: int, m: float) -> float:
    return 2 * (n - 1) * link.alpha_s + (n - 1) / n * m * (2 * link.beta_s + link.gamma_s)


def _halving_doubling(link: Link, n: int, m: float) -> float:
    return 2 * rounds(n) * link.alpha_s + (n - 1) / n * m * (2 * link.beta_s + link.gamma_s)


def _double_tree(link: Link, n: int, m: float) -> float:
    return 2 * rounds(n) * link.alpha_s + m * (2 * link.beta_s + link.gamma_s)


def _published_double_tree(link: Link, n: int, m: float) -> float:
    return 2 * rounds(n) * link.alpha_s + m * (link.beta_s + link.gamma_s)


def _binary_tree(link: Link, n: int, m: float) -> float:
    return rounds(n) * (2 * link.alpha_s + m * (2 * link.beta_s + link.gamma_s))


def _recursive_doubling(link: Link, n: int, m: float) -> float:
    return rounds(n) * (link.alpha_s + m * (link.beta_s + link.gamma_s))


ALL_REDUCE: Mapping[str, Callable[[Link, int, float], float]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "double_tree": _double_tree,
    "binary_tree": _binary_tree,
    "recursive_doubling": _recursive_doubling,
}
PUBLISHED = {"double_tree": _published_double_tree}


def _all_gather(link: Link, n: int, b: float, algorithm: str) -> float:
    messages = n - 1 if algorithm == "ring" else rounds(n)
    return messages * link.alpha_s + (n - 1) * b * link.beta_s


def _pairwise_scatter(link: Link, n: int, num_bytes: float, _algorithm: str) -> float:
    return (n - 1) * link.alpha_s + num_bytes * link.beta_s


def _broadcast(link: Link, n: int, m: float, algorithm: str) -> float:
    if algorithm in ("binary_tree", "recursive_doubling"):
        return rounds(n) * (link.alpha_s + m * link.beta_s)
    scatter = rounds(n) * link.alpha_s + (n - 1) / n * m * link.beta_s
    return scatter + _all_gather(link, n, m / n, algorithm)


OTHERS: Mapping[str, Callable[[Link, int, float, str], float]] = {
    "gather_rows": _all_gather,
    "gather_lists": _all_gather,
    "scatter": _pairwise_scatter,
    "broadcast": _broadcast,
}
