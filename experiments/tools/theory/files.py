"""Write the files of a check of the theory: theory.csv, theory.md, and figures with their numbers."""

from collections.abc import Iterator, Mapping

import pandas as pd
from torch import Tensor

from experiments.reports.names import label
from experiments.tools.shared.drawings import Content
from experiments.tools.shared.markdown import Column, Columns, table_of
from experiments.tools.theory.figures import draw_curve, draw_errors, draw_histogram, draw_operators
from experiments.tools.theory.measure import OPERATORS, curve_numbers, error_numbers, histogram_numbers

HOW_TO_READ = """\
u is rank 0's accumulator, d its length. *mean* and *deviation* are those of the normal law fitted to it, *kurtosis* is
its excess over a normal's 0. *convex* and *below the line* say whether the curve of squared, sorted, normalised
magnitudes is as the bound assumes. *worst ratio* is the largest ||u - Top_k(u)||^2 / ||u||^2 over (1 - k/d)^2 at the
shares checked: above 1 the bound is broken, for any reason; *at k/d* is where. Equal magnitudes break the assumption,
and with it the bound.
"""
COLUMNS: Columns = {
    "u": Column("vector"),
    "mean": Column("mean", "{:.3g}"),
    "deviation": Column("deviation", "{:.3g}"),
    "kurtosis": Column("excess_kurtosis", "{:.3g}"),
    "convex": Column("convex"),
    "below the line": Column("below_line"),
    "bound holds": Column("holds"),
    "worst ratio": Column("worst_ratio", "{:.4g}"),
    "at k/d": Column("worst_share", "{:.3g}"),
}
FIGURES = (
    ("histogram", draw_histogram, histogram_numbers),
    ("pi-squared", draw_curve, curve_numbers),
    ("error", draw_errors, error_numbers),
)


def files(
    vectors: Mapping[str, Tensor], rows: pd.DataFrame, density: float, opening: str
) -> Iterator[tuple[str, Content]]:
    """Yield the name and content of each file.

    Args:
        rows: of ``check``, one per vector; the column ``vector`` names it.
        density: of their training.
        opening: the first lines of the report.
    """
    yes = {key: rows[key].map({True: "yes", False: "no"}) for key in ("convex", "below_line", "holds")}
    yield "theory", rows
    yield "theory", "\n".join([opening, HOW_TO_READ, table_of(rows.assign(**yes), COLUMNS), ""])
    numel = next(iter(vectors.values())).numel()
    for name, draw, numbers_of in FIGURES:
        numbers = pd.concat({vector: numbers_of(values) for vector, values in vectors.items()}, names=["vector", None])
        numbers = numbers.reset_index("vector").reset_index(drop=True)
        yield name, (draw(numbers, f"Accumulators under top-k, density {density:g}, d = {numel:,}"), numbers)


def files_of_times(times: pd.DataFrame, density: float, world_size: int) -> Iterator[tuple[str, Content]]:
    """Yield the figure of the times of the operators, if there are any at several lengths."""
    if times["numel"].nunique() > 1:
        names = {name: label(name) for name in OPERATORS} | {"micro": f"{label('micro')}, 1/{world_size} slice"}
        title = f"Time to find the largest, one rank, density {density:g}"
        yield "operators", (draw_operators(times, names, title), times)
