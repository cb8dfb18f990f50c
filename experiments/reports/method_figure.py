"""The figure of all methods of a study: a measure and the bytes sent, a line each."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import head, new_figure, plain_log, show_metric
from experiments.reports.measures import Metric
from experiments.reports.names import label
from experiments.reports.plot_style import BLACK, PAGE_INCHES, LineSettings, look, plain, style


@style()
def draw_methods(numbers: pd.DataFrame, metric: Metric, title: str) -> Figure:
    """A measure and the bytes of every method, a line each; a bar spans the seeds. Takes rows of ``summarise``.

    The target density of most methods is drawn full, another one hollow, with the density beside it.
    """
    names = [label(str(row["sparsifier"]), str(row["variant"])) for _, row in numbers.iterrows()]
    lines = list(dict.fromkeys(names))
    figure = new_figure(PAGE_INCHES, 1.0 + 0.16 * len(lines))
    left, right = figure.subplots(1, 2, sharey=True)
    usual = float(numbers.loc[numbers["density"] < 1, "density"].mode().max())
    for name, (_, row) in zip(names, numbers.iterrows(), strict=True):
        height, color = lines.index(name), look(str(row["sparsifier"])).color
        other_density = row["density"] not in (1.0, usual)
        mark: LineSettings = {"color": color, "marker": "o", "markerfacecolor": "white" if other_density else color}
        left.hlines(height, row[f"{metric.key}_min"], row[f"{metric.key}_max"], color=color, linewidth=0.8)
        left.plot(row[metric.key], height, **mark)
        right.plot(row["bytes_sent"], height, linestyle="none", **mark)
        if other_density:
            _name_density(right, row, height, numbers[numbers["density"] == usual])
    left.set_yticks(range(len(lines)), [plain(line) for line in lines])
    left.set_ylim(len(lines) - 0.5, -0.5)  # the first on top, no marker cut
    show_metric(left.xaxis, metric)
    left.set(xlabel=f"{metric.label}, mean and range over seeds")
    right.set(xlabel="sent per step and worker")
    right.margins(x=0.18)
    plain_log(right.xaxis)
    right.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    handles = [Line2D([], [], label=f"density {usual:g}, or everything", color=BLACK, marker="o", linestyle="none")]
    if not numbers["density"].isin([1.0, usual]).all():
        hollow: LineSettings = {"color": BLACK, "marker": "o", "markerfacecolor": "white", "linestyle": "none"}
        handles.append(Line2D([], [], label="the density beside it", **hollow))
    head(figure, title, handles)
    return figure


def _name_density(axes: Axes, row: pd.Series, height: int, usual_rows: pd.DataFrame) -> None:
    """Write the density beside a point, on the side away from the method's point of the usual density."""
    twin = usual_rows[usual_rows["sparsifier"] == row["sparsifier"]]["bytes_sent"]
    side = -1 if (twin > row["bytes_sent"]).any() else 1
    axes.annotate(
        f"{row['density']:.2g}",
        (row["bytes_sent"], height),
        xytext=(4 * side, 0),
        textcoords="offset points",
        ha="left" if side > 0 else "right",
        va="center",
        fontsize=5.5,
    )
