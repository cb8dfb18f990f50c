"""The figure of what keeps up: the measure over the density that was used, and over the bytes that were sent."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import handles_of, head, new_figure, plain_log, show_metric
from experiments.reports.frames import METHOD
from experiments.reports.measures import Metric
from experiments.reports.method_curves import best_of, curves_of
from experiments.reports.plot_style import PAGE_INCHES, TARGET_LINE, style

POINTS, SHARE = 0.01, 0.02  # how far below dense a share may be, and how far above it what is better small


def goal_of(dense: float, metric: Metric) -> float:
    """Return what is just level with dense."""
    return dense - POINTS if metric.higher_is_better else dense * (1 + SHARE)


@style()
def draw_keep_up(rows: pd.DataFrame, metric: Metric, title: str) -> Figure:
    """A line per method with half the range over seeds; the band is what keeps up; takes rows of ``with_goal``."""
    figure = new_figure(PAGE_INCHES, 3.4)
    panels = figure.subplots(1, 2, sharey=True)
    is_dense = rows["sparsifier"] == "dense"
    dense = rows[is_dense]["value"].iloc[0]
    ends = rows[~is_dense].groupby(METHOD)["value"].agg("max" if metric.higher_is_better else "min")
    curves = curves_of(rows[~is_dense], best_of(ends, metric))
    for axes, column in zip(panels, ("measured_density", "total_bytes"), strict=True):
        axes.axhspan(goal_of(dense, metric), dense, color="0.88", linewidth=0)
        axes.axhline(dense, **TARGET_LINE)
        for curve in curves:
            own = curve.rows.sort_values(column)
            axes.errorbar(own[column], own["value"], own["half_range"], capsize=2, **curve.line)
        plain_log(axes.xaxis)
    panels[0].set_xlabel("density of the update")
    panels[1].set_xlabel("sent by a worker")
    panels[1].xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    show_metric(panels[0].yaxis, metric)
    handles = handles_of({curve.name: curve.line for curve in curves})
    head(figure, title, [Line2D([], [], label="dense; the band keeps up", **TARGET_LINE), *handles])
    return figure
