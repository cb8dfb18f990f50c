"""What each way to find the largest elements costs on one rank."""

from collections.abc import Sequence

import pandas as pd

from experiments.studies.methods import build_methods, known_methods
from experiments.studies.selection_times import TIMES, reference_times, time_selection, timing_gradient
from micro import kernels

OPERATORS = ("topk", "gaussiank", "gaussiank_published", "dgc", "sidco", "redsync", "micro")


def operator_times(lengths: Sequence[int], density: float, world_size: int, repeats: int) -> pd.DataFrame:
    """Time the operators at each length, MiCRO on its slice of one in ``world_size``; method, numel, TIMES."""
    kernels.prepare()
    rows = []
    for numel in lengths:
        gradient = timing_gradient(numel, density)
        times = reference_times(gradient, density, repeats)
        for name, reducer in build_methods([name for name in OPERATORS if name in known_methods()], density).items():
            searched = gradient[: -(-numel // world_size)] if name == "micro" else gradient
            times[name] = time_selection(reducer, searched, repeats)
        rows += [{"method": name, "numel": numel} | found for name, found in times.items()]
    return pd.DataFrame(rows, columns=["method", "numel", *TIMES])
