"""The figure of what keeps up: the measure over the density that was used, and over the bytes that were sent."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import handles_of, head, new_figure, plain_log, show_metric
from experiments.reports.frames import METHOD as CURVE
from experiments.reports.measures import Metric, metric_of
from experiments.reports.method_curves import best_of, curves_of
from experiments.reports.plot_style import PAGE_INCHES, TARGET_LINE, style

POINTS, SHARE = 0.01, 0.02  # how far below dense a share may be, and how far above it what is better small
METHOD = ["sparsifier", "form"]


def with_goal(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of methods with several targets, and the best dense one, with ``keeps_up``."""
    metric, is_dense = metric_of(rows["metric"]), rows["sparsifier"] == "dense"
    best = rows[is_dense].nlargest(1, "to_dense")
    room = abs(goal_of(best["value"].iloc[0], metric) - best["value"].iloc[0])
    several = rows.groupby(METHOD)["density"].transform("nunique") > 1
    return rows.assign(keeps_up=rows["to_dense"] >= -room)[(several & ~is_dense) | rows.index.isin(best.index)]


def goal_of(dense: float, metric: Metric) -> float:
    """Return what is just level with dense."""
    return dense - POINTS if metric.higher_is_better else dense * (1 + SHARE)


@style()
def draw_keep_up(rows: pd.DataFrame, title: str) -> Figure:
    """A line per method with half the range over seeds; the band is what keeps up; takes rows of ``with_goal``."""
    figure, metric = new_figure(PAGE_INCHES, 3.4), metric_of(rows["metric"])
    panels = figure.subplots(1, 2, sharey=True)
    is_dense = rows["sparsifier"] == "dense"
    dense = rows[is_dense]["value"].iloc[0]
    sparse = rows[~is_dense].rename(columns={"form": "variant"})
    ends = sparse.groupby(CURVE)["value"].agg("max" if metric.higher_is_better else "min")
    curves = curves_of(sparse, best_of(ends, metric))
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
