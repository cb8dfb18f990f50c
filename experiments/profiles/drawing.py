"""Curves that were measured: points and the line that fits them, both axes logarithmic."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from experiments.reports.figure_parts import head, new_figure, plain_log
from experiments.reports.plot_style import MARKERS, PALETTE, style
from micro.planning.tables import Curve


def numbers_of(curves: Mapping[str, Curve], key: str, size: str) -> pd.DataFrame:
    """Return the points of all curves; columns ``key``, ``size``, seconds and fit_s."""
    rows = [
        {key: name, size: x, "seconds": y, "fit_s": curve.alpha_s + curve.beta_s * x}
        for name, curve in curves.items()
        for x, y in zip(curve.sizes, curve.seconds, strict=True)
    ]
    return pd.DataFrame(rows)


@style()
def draw_curves(numbers: pd.DataFrame, labels: Mapping[str, str], title: str, x_name: str) -> Figure:
    """Milliseconds over size, a colour per curve; columns as ``numbers_of`` returns them, in this order."""
    key, size = numbers.columns[:2]
    figure = new_figure(4.0, 3.4)
    axes = figure.subplots()
    handles = []
    for place, (name, rows) in enumerate(numbers.groupby(key, sort=False)):
        color, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
        axes.plot(rows[size], 1e3 * rows["seconds"], color=color, marker=marker, linestyle="none")
        along = np.geomspace(rows[size].min(), rows[size].max(), 200)
        axes.plot(along, 1e3 * np.interp(along, rows[size], rows["fit_s"]), color=color)  # a straight line bends here
        handles.append(Line2D([], [], color=color, marker=marker, label=labels[str(name)]))
    axes.set(xlabel=x_name, ylabel="time (ms)")
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    plain_log(axes.yaxis)
    head(figure, title, handles)
    return figure
