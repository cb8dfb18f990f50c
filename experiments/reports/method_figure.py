"""The figure of all methods of a study: a measure and the bytes sent, a line each."""

import pandas as pd
from matplotlib.figure import Figure

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import head, new_figure, plain_log, show_metric
from experiments.reports.measures import Metric
from experiments.reports.names import label
from experiments.reports.plot_style import PAGE_INCHES, highlight, plain, style


@style()
def draw_methods(numbers: pd.DataFrame, metric: Metric, title: str) -> Figure:
    """A measure and the bytes of every method and density, a line each; a bar spans the seeds.

    Takes rows of ``summarise``.
    """
    has_several = numbers.loc[numbers["density"] < 1, "density"].nunique() > 1
    figure = new_figure(PAGE_INCHES, 0.9 + 0.16 * len(numbers))
    left, right = figure.subplots(1, 2, sharey=True)
    for height, (_, row) in enumerate(numbers.iterrows()):
        color = highlight(str(row["sparsifier"]))
        left.hlines(height, row[f"{metric.key}_min"], row[f"{metric.key}_max"], color=color, linewidth=0.8)
        left.plot(row[metric.key], height, color=color, marker="o")
        right.plot(row["bytes_sent"], height, color=color, marker="o")
    names = [_name(row, with_density=has_several) for _, row in numbers.iterrows()]
    left.set_yticks(range(len(names)), [plain(name) for name in names])
    left.set_ylim(len(names) - 0.5, -0.5)  # the first on top, no marker cut
    show_metric(left.xaxis, metric)
    left.set(xlabel=f"{metric.label}, mean and range over seeds")
    right.set(xlabel="sent per step and worker")
    right.margins(x=0.18)
    plain_log(right.xaxis)
    right.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    head(figure, title, [])
    return figure


def _name(row: pd.Series, *, with_density: bool) -> str:
    name = label(str(row["sparsifier"]), str(row["variant"]))
    return f"{name}, {row['density']:g}" if with_density and row["density"] < 1 else name
