"""The figure of an ablation: what each form reached, its spread, and what it sent."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reports.figure_parts import head, new_figure, plain_log, show_metric
from experiments.reports.measures import Metric
from experiments.reports.names import label
from experiments.reports.plot_style import PAGE_INCHES, TARGET_LINE, look, plain, style


@style()
def draw_forms(rows: pd.DataFrame, metric: Metric, title: str) -> Figure:
    """A line per form, the best on top: the measure with the range over seeds, and the bytes as a share of dense's."""
    figure = new_figure(PAGE_INCHES, 0.9 + 0.16 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for height, (_, row) in enumerate(rows.iterrows()):
        color = look(str(row["sparsifier"])).color
        left.hlines(height, row["low"], row["high"], color=color, linewidth=0.8)
        left.plot(row["value"], height, color=color, marker="o")
        right.plot(100 * row["of_dense"], height, color=color, marker="o")
    best = rows[rows["of_dense"] == 1]["value"]
    left.axvline(best.max() if metric.higher_is_better else best.min(), **TARGET_LINE)
    names = [f"{label(row['sparsifier'], row['change'])}, rate {row['rate']:g}" for _, row in rows.iterrows()]
    left.set_yticks(range(len(names)), [plain(name) for name in names])
    left.set_ylim(len(names) - 0.5, -0.5)
    show_metric(left.xaxis, metric)
    right.set(xlabel="sent, % of dense")
    right.margins(x=0.1)
    plain_log(right.xaxis)
    line = Line2D([], [], label="dense, at the best of its rates", **TARGET_LINE)
    head(figure, f"{title}: mean and range over seeds", [line])
    return figure
