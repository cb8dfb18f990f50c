"""At which density does each method send as much as another one: the fair question where the network is the limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.studies.gradient_sources import Gradients
from experiments.studies.method_comparison.trial import trial
from experiments.studies.methods import build_methods

TOLERANCE = 0.02  # of the bytes wanted
MAX_TRIALS = 8


@dataclass(frozen=True, slots=True)
class Match:
    """A method's density at which its bytes come nearest to the bytes wanted.

    Attributes:
        method: its name.
        density: its target.
        bytes_share: what it sends then, over the bytes of a dense all-reduce.
    """

    method: str
    density: float
    bytes_share: float


def match_bytes(
    methods: Sequence[str], bytes_share: float, density: float, gradients: Gradients, world_size: int
) -> list[Match]:
    """Return for each method the density at which it sends ``bytes_share``, found by trials from ``density`` on.

    Methods whose bytes do not depend on the density are left out.
    """
    found = (_match(method, bytes_share, density, gradients, world_size) for method in methods)
    return [match for match in found if match is not None]


def _match(method: str, wanted: float, density: float, gradients: Gradients, world_size: int) -> Match | None:
    best: Match | None = None
    for _ in range(MAX_TRIALS):
        (reducer,) = build_methods([method], density).values()
        row, _ = trial(method, reducer, gradients, world_size)
        if row["density"] == 1.0 and density < 1:
            return None  # it sends everything, whatever its target
        current = Match(method, density, row["bytes_share"])
        if best is None or _distance(current, wanted) < _distance(best, wanted):
            best = current
        if _distance(current, wanted) <= TOLERANCE:
            break
        density = float(f"{min(1.0, density * min(max(wanted / current.bytes_share, 0.1), 10.0)):.4g}")
    return best


def _distance(match: Match, wanted: float) -> float:
    return abs(match.bytes_share / wanted - 1)
