"""The figure of lengths: how far each method ends from dense training, over the epochs that a training has."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.reports.figure_parts import handles_of, head, new_figure
from experiments.reports.measures import metric_of
from experiments.reports.names import human, label
from experiments.reports.plot_style import GREY, PAGE_INCHES, LineSettings, lines_of, style

TRAINING = ["model", "dataset", "world_size"]
METHOD = ["sparsifier", "form"]
OF_ONE_LINE = [*TRAINING, "density", *METHOD]
COLUMNS = 3


def at_several_lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Return those rows of ``reached`` whose method ended trainings of several lengths, and their dense rows."""
    is_dense = rows["sparsifier"] == "dense"
    sparse = rows[~is_dense]
    several = sparse[sparse.groupby(OF_ONE_LINE)["epochs"].transform("nunique") > 1]
    lengths = several[[*TRAINING, "epochs"]].drop_duplicates()
    return pd.concat([rows[is_dense].merge(lengths), several], ignore_index=True)


@style()
def draw_lengths(rows: pd.DataFrame, title: str) -> Figure:
    """A panel per training, a line per method and density; takes rows of ``at_several_lengths``.

    Bars, and the grey band, which is dense's, are half the range of the seeds.
    """
    trainings = list(rows.groupby(TRAINING))
    columns = min(len(trainings), COLUMNS)
    num_rows = -(-len(trainings) // columns)
    methods = rows[rows["sparsifier"] != "dense"].drop_duplicates(["density", *METHOD])
    lines = lines_of(_key(row) for _, row in methods.iterrows())
    figure = new_figure(PAGE_INCHES, 0.8 + 2.0 * num_rows)
    grid = figure.subplots(num_rows, columns, squeeze=False)
    for axes, (training, own) in zip(grid.flat, trainings, strict=False):
        model, dataset, world_size = training
        axes.set_title(f"{human(str(model))} on {human(str(dataset))}, {world_size} workers", fontsize=7)
        _draw(axes, own, lines)
    for axes in grid.flat[len(trainings) :]:
        axes.remove()
    handles = handles_of({_name(row): lines[_key(row)] for _, row in methods.iterrows()})
    head(figure, title, [*handles, Patch(label="dense, spread of its seeds", color=GREY, alpha=0.3, linewidth=0)])
    return figure


def _draw(axes: Axes, rows: pd.DataFrame, lines: Mapping[tuple[str, str], LineSettings]) -> None:
    metric, is_dense = metric_of(rows["metric"]), rows["sparsifier"] == "dense"
    dense = rows[is_dense].sort_values("epochs")
    spread = metric.scale * dense["half_range"]
    axes.axhline(0, color=GREY, linewidth=0.6)
    axes.fill_between(dense["epochs"], -spread, spread, color=GREY, alpha=0.3, linewidth=0)
    for _, own in rows[~is_dense].groupby(OF_ONE_LINE, sort=False):
        line = own.sort_values("epochs")
        values, errors = metric.scale * line["to_dense"], metric.scale * line["half_range"]
        axes.errorbar(line["epochs"], values, errors, capsize=2, **lines[_key(line.iloc[0])])
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(rows["epochs"].unique())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("epochs")
    axes.set_ylabel(metric.column, fontsize=7)


def _key(row: pd.Series) -> tuple[str, str]:
    return str(row["sparsifier"]), f"{row['form']}, {row['density']:g}"


def _name(row: pd.Series) -> str:
    return f"{label(str(row['sparsifier']), str(row['form']))}, {row['density']:g}"
