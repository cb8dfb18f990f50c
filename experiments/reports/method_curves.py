"""The lines of methods in a figure: one colour, dashes and marker each, other dashes for variants.

Of many methods some have their colours, and the others are grey.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.reports.frames import METHOD
from experiments.reports.measures import Metric
from experiments.reports.names import in_order, label
from experiments.reports.plot_style import BLACK, DASHES, LIGHT, MARKERS, PALETTE, LineSettings, look

MOST_COLOURS = 10  # lines that can be told apart in one panel
NUM_LEADING = 8  # that are in colour where there are more
ALWAYS = ("dense", "micro")  # in colour wherever they are: the baseline, and the method of this project
GREY_LINE: LineSettings = {"color": LIGHT, "linestyle": "-", "linewidth": 0.6, "zorder": 1.2}

Methods = Collection[tuple[str, str]]  # sparsifier and variant of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One method in a figure: its name, how its line looks, its rows of the numbers."""

    name: str
    line: LineSettings
    rows: pd.DataFrame
    is_grey: bool = False

    @property
    def color(self) -> str:
        """The method's colour."""
        return str(self.line["color"])

    def handle(self, num_seeds: int) -> Line2D:
        """Entry of the legend."""
        return Line2D([], [], label=f"{self.name} (n={num_seeds})", **self.line)


def leading(epochs: pd.DataFrame, metric: Metric) -> Methods | None:
    """Return the methods to be drawn in colour where there are more than MOST_COLOURS; None where all are.

    They are ALWAYS, and then the best by the mean of the last epoch's measure, NUM_LEADING in all.
    """
    ends = epochs.groupby("run").tail(1).groupby(METHOD)[metric.key].mean()
    if len(ends) <= MOST_COLOURS:
        return None
    ranked = list(ends.sort_values(ascending=not metric.higher_is_better, na_position="last").index)
    first = [method for method in ranked if method[0] in ALWAYS and not method[1]]
    return [*first, *(method for method in ranked if method not in first)][:NUM_LEADING]


def legend_of(curves: Sequence[Curve], seeds: Callable[[Curve], int]) -> list[Line2D]:
    """Return the entries of a legend: one for each line in colour, and one for all grey ones.

    Args:
        seeds: how many seeds a curve has.
    """
    handles = [curve.handle(seeds(curve)) for curve in curves if not curve.is_grey]
    num_grey = len(curves) - len(handles)
    return [*handles, Line2D([], [], label=f"{num_grey} others", **GREY_LINE)] if num_grey else handles


def rule_of(coloured: Methods | None, metric: Metric) -> str:
    """Return how the methods in colour were chosen, for the title of a figure; empty where all are."""
    return f"; in colour: dense, MiCRO and the best by {metric.name}, {NUM_LEADING} in all" if coloured else ""


def curves_of(numbers: pd.DataFrame, coloured: Methods | None = None) -> list[Curve]:
    """Return the methods of ``numbers`` in their order; if there is one method alone, its variants differ in colour.

    Args:
        coloured: the methods with a colour of their own, the others are grey; None: all have one.
    """
    curves = []
    methods = in_order(numbers["sparsifier"])
    for sparsifier in methods:
        variants = numbers[numbers["sparsifier"] == sparsifier].groupby("variant")
        for place, (variant, rows) in enumerate(variants):
            line = _variant_line(place) if len(methods) == 1 and len(variants) > 1 else _line(sparsifier, place)
            is_grey = coloured is not None and (sparsifier, str(variant)) not in coloured
            name = label(sparsifier, str(variant))
            curves.append(Curve(name=name, line=GREY_LINE if is_grey else line, rows=rows, is_grey=is_grey))
    return curves


def _variant_line(place: int) -> LineSettings:
    colors = (BLACK, *PALETTE[:-1])
    return {
        "color": colors[place % len(colors)],
        "linestyle": DASHES[place % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def _line(sparsifier: str, place: int) -> LineSettings:
    """Line settings of a method; its second and further variants keep colour and marker, hollow, in other dashes."""
    method = look(sparsifier)
    if place == 0:
        return method.line
    others = [dashes for dashes in DASHES if dashes != method.dashes]
    return method.line | {"linestyle": others[(place - 1) % len(others)], "markerfacecolor": "white"}


def draw_seeds(axes: Axes, curve: Curve, column: str, place: int) -> None:
    """Draw a thin line per seed and a strong one for their mean, of a grey curve this alone.

    Args:
        place: spreads the markers.
    """
    for _, seed in [] if curve.is_grey else curve.rows.groupby("seed"):
        axes.plot(seed["step"], seed[column], color=curve.color, linewidth=0.4, alpha=0.4)
    mean = curve.rows.groupby("step")[column].mean()
    every = max(1, len(mean) // 6)
    axes.plot(mean.index, mean, markevery=(place * every // len(MARKERS) % every, every), **curve.line)
