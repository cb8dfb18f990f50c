"""What steps reach beside gradients, by pairs of runs with equal seeds."""

import pandas as pd

from experiments.reports.tokens.forms import Plan, forms_of
from experiments.reports.tokens.rows import ends_of, with_finished

OF_PAIR = ["method", "density", "passes", "world_size"]  # what both runs of a pair have in common, beside the seed
BOTH = ["seed", "bits_per_byte"]
GRADIENTS, STEPS = "gradients", "each worker's own step"


def gains(points: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """Return by how many bits per byte each worker's own step ends lower than gradients, a row per OF_PAIR.

    Columns: those of OF_PAIR, num_pairs of equal seeds, gain (its mean), low, high. Empty where there is no such pair.

    Args:
        points: of ``points``.
    """
    ends = ends_of(points)["bits_per_byte"]
    found = [
        {"method": form.method, "density": form.density, "passes": form.passes, "world_size": form.world_size}
        | {"exchanged": form.exchanged, "seed": plan[run]["seed"], "bits_per_byte": ends[run]}
        for form, runs in with_finished(points, forms_of(plan))
        for run in runs
        if form.exchanged in (GRADIENTS, STEPS)
    ]
    table = pd.DataFrame(found, columns=[*OF_PAIR, "exchanged", *BOTH])
    wide = table.pivot_table(index=[*OF_PAIR, "seed"], columns="exchanged", values="bits_per_byte")
    wide = wide.reindex(columns=[GRADIENTS, STEPS]).dropna()
    gain = (wide[GRADIENTS] - wide[STEPS]).groupby(OF_PAIR)
    return gain.agg(num_pairs="size", gain="mean", low="min", high="max").reset_index()
