"""Everything that a check of the theory writes: theory.csv, theory.md, and the figures with their numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from experiments.reports.csv_files import write_csv
from experiments.reports.figure_parts import save
from experiments.reports.markdown import table
from experiments.reports.names import label
from experiments.reports.output import write_file
from experiments.studies.selection_times import wide_spread
from experiments.studies.topk_theory.figures import draw_curve, draw_errors, draw_histogram, draw_operators
from experiments.studies.topk_theory.measure import OPERATORS, curve_numbers, error_numbers, histogram_numbers

HOW_TO_READ = """\
u is rank 0's accumulator, d its length. *mean* and *deviation* are those of the normal law fitted to it, *kurtosis* is
its excess over a normal's 0. *convex* and *below the line* say whether the curve of squared, sorted, normalised
magnitudes is as the bound assumes. *worst ratio* is the largest ||u - Top_k(u)||^2 / ||u||^2 over (1 - k/d)^2 at the
shares checked: above 1 the bound is broken, for any reason; *at k/d* is where. Equal magnitudes break the assumption,
and with it the bound.
"""
COLUMNS = ["u", "mean", "deviation", "kurtosis", "convex", "below the line", "bound holds", "worst ratio", "at k/d"]
FIGURES = (
    ("histogram", draw_histogram, histogram_numbers),
    ("pi-squared", draw_curve, curve_numbers),
    ("error", draw_errors, error_numbers),
)


def write(vectors: Mapping[str, Tensor], rows: pd.DataFrame, density: float, out: Path, opening: str) -> list[Path]:
    """Write table, numbers and figures of the vectors; returns the paths.

    Args:
        rows: of ``check``, one per vector; the column ``vector`` names it.
        density: of the training that they are from.
        opening: the first lines of the report.
    """
    lines = [_cells(row) for _, row in rows.iterrows()]
    report = "\n".join([opening, HOW_TO_READ, table(COLUMNS, lines), ""])
    written = [write_csv(rows, out / "theory.csv"), write_file(out / "theory.md", report)]
    numel = next(iter(vectors.values())).numel()
    for stem, draw, numbers_of in FIGURES:
        parts = [numbers_of(values).assign(vector=name) for name, values in vectors.items()]
        numbers = pd.concat(parts, ignore_index=True)
        numbers = numbers[["vector", *numbers.columns[:-1]]]
        figure = draw(numbers, f"Accumulators under top-k, density {density:g}, d = {numel:,}")
        written += save(figure, numbers, out / stem)
    return written


def write_times(times: pd.DataFrame, density: float, world_size: int, out: Path) -> list[Path]:
    """Draw the times of the operators, if there are any at several lengths; returns the paths."""
    if times["numel"].nunique() < 2:
        return []
    names = {name: label(name) for name in OPERATORS} | {"micro": f"{label('micro')}, 1/{world_size} slice"}
    title = f"Time to find the largest, one rank, density {density:g}"
    return save(draw_operators(times, names, title), times, out / "operators", notes=wide_spread(times))


def _cells(row: "pd.Series[Any]") -> list[str]:
    return [
        row["vector"],
        *(f"{row[key]:.3g}" for key in ("mean", "deviation", "excess_kurtosis")),
        *("yes" if row[key] else "no" for key in ("convex", "below_line", "holds")),
        f"{row['worst_ratio']:.4g}",
        f"{row['worst_share']:.3g}",
    ]
