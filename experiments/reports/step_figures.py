"""Figures over steps: how a measure converges, density and its error, norms of residuals."""

from collections.abc import Collection

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reports.figure_parts import draw_band, head, new_figure, plain_log, plain_ticks, show_metric
from experiments.reports.measures import Metric
from experiments.reports.method_curves import curves_of, draw_seeds, legend_of
from experiments.reports.plot_style import COLUMN_INCHES, GREY_LINE, PAGE_INCHES, TARGET_LINE, style


@style()
def draw_convergence(
    numbers: pd.DataFrame, metric: Metric, title: str, *, coloured: Collection[object] | None = None
) -> Figure:
    """A measure over steps, over time and over bytes sent; a band spans the seeds. Takes ``convergence_numbers``.

    Bytes are left out where there are none, as with one worker. Of many methods those that are ``coloured`` have
    colour, band and a place in the legend.
    """
    time_scale, time_unit = _time_unit(numbers["time_s"].max())
    byte_scale, byte_unit = _byte_unit(numbers["total_bytes"].max())
    panels = [("step", 1.0, "step"), ("time_s", time_scale, f"training time ({time_unit})")]
    if numbers["total_bytes"].max() > 0:
        panels.append(("total_bytes", byte_scale, f"sent per worker ({byte_unit})"))
    figure = new_figure(PAGE_INCHES, 2.7)
    grid = figure.subplots(1, len(panels), sharey=True)
    curves = curves_of(numbers, coloured)
    for axes, (column, scale, name) in zip(grid, panels, strict=True):
        for place, curve in enumerate(curves):
            rows, every = curve.rows, max(1, len(curve.rows) // 8)
            line = curve.line if curve.line is GREY_LINE else curve.line | {"markevery": (place % every, every)}
            middle, low, high = (rows[f"{metric.key}{end}"] for end in ("", "_min", "_max"))
            draw_band(axes, rows[column] / scale, middle, low, high, line)
        axes.set_xlabel(name)
        if column == "total_bytes":  # methods are orders of magnitude apart
            plain_log(axes.xaxis)
    show_metric(grid[0].yaxis, metric)
    head(figure, title, legend_of(curves))
    return figure


@style()
def draw_density(numbers: pd.DataFrame, title: str, *, coloured: Collection[object] | None = None) -> Figure:
    """Density and its error over steps: a thin line per seed, a strong one for the mean. Takes ``density_numbers``."""
    figure = new_figure(COLUMN_INCHES, 3.9)
    top, bottom = figure.subplots(2, 1, sharex=True)
    curves = curves_of(numbers, coloured)
    for place, curve in enumerate(curves):
        draw_seeds(top, curve, "density", place)
        draw_seeds(bottom, curve, "density_error", place)
    target = numbers.groupby("step")["target_density"].first()
    top.plot(target.index, target, zorder=1.5, **TARGET_LINE)
    top.set(ylabel="density")
    plain_log(top.yaxis)
    bottom.set(ylabel="density error", xlabel="step")
    _log_with_zero(bottom, numbers["density_error"])
    handles = legend_of(curves)
    head(figure, title, [*handles, Line2D([], [], label="target", **TARGET_LINE)])
    return figure


@style()
def draw_residuals(numbers: pd.DataFrame, title: str, *, coloured: Collection[object] | None = None) -> Figure:
    """Norm of rank 0's residual over steps: a thin line per seed, a strong one for the mean.

    Takes ``residual_numbers``.
    """
    figure = new_figure(COLUMN_INCHES, 2.6)
    axes = figure.subplots()
    curves = curves_of(numbers, coloured)
    for place, curve in enumerate(curves):
        draw_seeds(axes, curve, "residual_norm", place)
    axes.set(ylabel="norm of the residual", xlabel="step")
    plain_log(axes.yaxis)
    head(figure, title, legend_of(curves))
    return figure


def _log_with_zero(axes: Axes, values: pd.Series) -> None:
    """Logarithmic above the smallest decade that matters, linear down to zero: an exact method has no error."""
    least = values[values > 0].min()
    decade = 1e-3 if np.isnan(least) else max(1e-4, 10 ** np.floor(np.log10(least)))
    axes.set_yscale("symlog", linthresh=decade)
    axes.set_ylim(bottom=-0.4 * decade)
    plain_ticks(axes.yaxis)


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds > 2 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if seconds > 5 * 60 else (1.0, "s")


def _byte_unit(count: float) -> tuple[float, str]:
    if count > 2e9:
        return 1e9, "GB"
    return (1e6, "MB") if count > 2e6 else (1e3, "kB")
