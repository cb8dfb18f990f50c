"""The figure of accuracy over density: what each method ends with at the densities that it was asked for."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import head, new_figure, plain_log, show_metric
from experiments.reports.frames import METHOD
from experiments.reports.measures import Metric
from experiments.reports.method_curves import best_of, curves_of, legend_of
from experiments.reports.plot_style import BLACK, PAGE_INCHES, TARGET_LINE, style


def at_several_densities(rows: pd.DataFrame) -> pd.DataFrame:
    """Return those rows of ``summarise`` whose method ran at several densities, and dense's; empty without any."""
    is_dense = rows["sparsifier"] == "dense"
    is_drawn = ~is_dense & (rows.groupby(METHOD)["density"].transform("nunique") > 1)
    return rows[is_dense | is_drawn] if is_drawn.any() else rows[is_drawn]


@style()
def draw_densities(rows: pd.DataFrame, metric: Metric, title: str) -> Figure:
    """A measure over the density asked for and over bytes, a line per method; bars, and dense's band, span the seeds.

    Takes rows of ``at_several_densities``.
    """
    figure = new_figure(PAGE_INCHES, 2.9)
    panels = figure.subplots(1, 2, sharey=True)
    is_dense = rows["sparsifier"] == "dense"
    best = best_of(rows[~is_dense].groupby(METHOD)[metric.key].mean(), metric)
    curves = curves_of(rows[~is_dense], best)
    for axes, column in zip(panels, ("density", "bytes_sent"), strict=True):
        for curve in curves:
            own = curve.rows.sort_values(column)
            if not curve.is_grey:
                low, high = (own[f"{metric.key}{end}"] for end in ("_min", "_max"))
                axes.vlines(own[column], low, high, color=curve.color, linewidth=0.8)
            axes.plot(own[column], own[metric.key], **curve.line)
        _draw_dense(axes, rows[is_dense], metric)
        plain_log(axes.xaxis)
    panels[0].set_xlabel("density asked for")
    panels[1].set_xlabel("sent per step and worker")
    panels[1].xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    show_metric(panels[0].yaxis, metric)
    dense = [Line2D([], [], label=f"dense (n={rows[is_dense]['num_seeds'].max()})", **TARGET_LINE)]
    handles = legend_of(curves, lambda curve: curve.rows["num_seeds"].max())
    head(figure, f"{title}: mean and range over seeds", [*(dense if is_dense.any() else []), *handles])
    return figure


def _draw_dense(axes: Axes, rows: pd.DataFrame, metric: Metric) -> None:
    for _, row in rows.iterrows():
        low, high = (float(row[f"{metric.key}{end}"]) for end in ("_min", "_max"))
        axes.axhspan(low, high, color=BLACK, alpha=0.1, linewidth=0)
        axes.axhline(row[metric.key], **TARGET_LINE)
