"""The lines of methods in a figure: one colour, dashes and marker each, other dashes for variants."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.reports.names import in_order, label
from experiments.reports.plot_style import BLACK, DASHES, MARKERS, PALETTE, LineSettings, look


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One method in a figure: its name, how its line looks, its rows of the numbers."""

    name: str
    line: LineSettings
    rows: pd.DataFrame

    @property
    def color(self) -> str:
        """The method's colour."""
        return str(self.line["color"])

    def handle(self, num_seeds: int) -> Line2D:
        """Entry of the legend."""
        return Line2D([], [], label=f"{self.name} (n={num_seeds})", **self.line)


def curves_of(numbers: pd.DataFrame) -> list[Curve]:
    """Return the methods of ``numbers`` in their order; if there is one method alone, its variants differ in colour."""
    curves = []
    methods = in_order(numbers["sparsifier"])
    for sparsifier in methods:
        variants = numbers[numbers["sparsifier"] == sparsifier].groupby("variant")
        for place, (variant, rows) in enumerate(variants):
            line = _variant_line(place) if len(methods) == 1 and len(variants) > 1 else _line(sparsifier, place)
            curves.append(Curve(name=label(sparsifier, str(variant)), line=line, rows=rows))
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
    """Draw a thin line per seed and a strong one for their mean; ``place`` spreads the markers."""
    for _, seed in curve.rows.groupby("seed"):
        axes.plot(seed["step"], seed[column], color=curve.color, linewidth=0.4, alpha=0.4)
    mean = curve.rows.groupby("step")[column].mean()
    every = max(1, len(mean) // 6)
    axes.plot(mean.index, mean, markevery=(place * every // len(MARKERS) % every, every), **curve.line)
