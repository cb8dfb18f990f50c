"""At which density does a method send as much as another one: the fair question where the network is the limit."""

from experiments.studies.gradient_sources import Gradients
from experiments.studies.method_comparison.trial import Row, trial
from experiments.studies.methods import build_methods

TOLERANCE = 0.02  # of the bytes wanted
MAX_TRIALS = 8


def match_bytes(method: str, wanted: float, density: float, gradients: Gradients, world_size: int) -> list[Row]:
    """Return the density at which a method's bytes come nearest to those wanted, found by trials from ``density`` on.

    Args:
        wanted: bytes over those of a dense all-reduce.

    Returns:
        One row of method, density and bytes_share; none where the method sends everything, whatever its target.
    """
    rows: list[Row] = []
    while len(rows) < MAX_TRIALS:
        (reducer,) = build_methods([method], density).values()
        row, _ = trial(method, reducer, gradients, world_size)
        if row["density"] == 1.0 and density < 1:
            return []
        share = row["bytes_share"]
        rows.append({"method": method, "density": density, "bytes_share": share})
        if abs(share / wanted - 1) <= TOLERANCE:
            break
        density = float(f"{min(1.0, density * min(max(wanted / share, 0.1), 10.0)):.4g}")
    return [min(rows, key=lambda row: abs(row["bytes_share"] / wanted - 1))]
