"""The lines of methods in a figure: a colour, dashes and a marker each; of many methods some are grey."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.reports.figure_parts import handles_of
from experiments.reports.frames import METHOD
from experiments.reports.measures import Metric
from experiments.reports.names import in_legend, in_order
from experiments.reports.plot_style import ALWAYS, FREE, GREY_LINE, MARKERS, LineSettings, lines_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One method in a figure: its name, how its line looks, its rows of the numbers."""

    name: str
    line: LineSettings
    rows: pd.DataFrame

    @property
    def num_seeds(self) -> int:
        """How many seeds its rows are of."""
        return int(self.rows["num_seeds"].max() if "num_seeds" in self.rows else self.rows["seed"].nunique())


def best_methods(ends: pd.Series, metric: Metric) -> Collection[object] | None:
    """Return the methods to be drawn in colour where there are more than colours; None where all are.

    They are those of ALWAYS, and then the best.

    Args:
        ends: a measure of each method; its index has names, or tuples that begin with one and a variant.
    """
    ranked = list(ends.sort_values(ascending=not metric.higher_is_better, na_position="last").index)
    first = [key for key in ranked if (key if isinstance(key, str) else key[0] * (not key[1])) in ALWAYS]
    others = [key for key in ranked if key not in first]
    return [*first, *others[: len(FREE)]] if len(others) > len(FREE) else None


def leading(epochs: pd.DataFrame, metric: Metric) -> Collection[object] | None:
    """Return the methods to be drawn in colour by the mean of the last epoch's measure; None where all are."""
    return best_methods(epochs.groupby("run").tail(1).groupby(METHOD)[metric.key].mean(), metric)


def rule_of(coloured: Collection[object] | None, metric: Metric) -> str:
    """Return how the methods in colour were chosen, for the title of a figure; empty where all are."""
    return f"; in colour: dense, MiCRO and the best {len(FREE)} others by {metric.name}" if coloured else ""


def curves_of(numbers: pd.DataFrame, coloured: Collection[object] | None = None) -> list[Curve]:
    """Return the methods of ``numbers`` in their order, each with a colour of its own; see ``lines_of``.

    Where the numbers have a density, a method at two of them is two curves.

    Args:
        coloured: the methods with a colour, the others are grey; None: the first, as far as there are colours.
    """
    keys = [*METHOD, *(["asked_density"] if "asked_density" in numbers else [])]
    order = in_order(numbers["sparsifier"])
    groups = sorted(numbers.groupby(keys), key=lambda group: (order.index(str(group[0][0])), *group[0][1:]))
    several = {key[0] for key, _ in groups if len({other[2:] for other, _ in groups if other[0] == key[0]}) > 1}
    names = [key for key, _ in groups]
    lines = lines_of(names, None if coloured is None else [key for key in names if key[:2] in coloured])
    curves = []
    for key, rows in groups:
        density = f", {key[2]:g}" if key[0] in several else ""
        curves.append(Curve(name=f"{in_legend(str(key[0]), str(key[1]))}{density}", line=lines[key], rows=rows))
    return curves


def legend_of(curves: Sequence[Curve]) -> list[Line2D]:
    """Return the entries of a legend: one for each line in colour, and one for all grey ones."""
    return handles_of({f"{curve.name} (n={curve.num_seeds})": curve.line for curve in curves})


def draw_seeds(axes: Axes, curve: Curve, column: str, place: int) -> None:
    """Draw a thin line per seed and a strong one for their mean, of a grey curve this alone.

    Args:
        place: spreads the markers.
    """
    for _, seed in [] if curve.line is GREY_LINE else curve.rows.groupby("seed"):
        axes.plot(seed["step"], seed[column], color=curve.line["color"], linewidth=0.4, alpha=0.4)
    mean = curve.rows.groupby("step")[column].mean()
    every = max(1, len(mean) // 6)
    axes.plot(mean.index, mean, markevery=(place * every // len(MARKERS) % every, every), **curve.line)
