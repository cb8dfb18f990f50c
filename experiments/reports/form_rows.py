"""Figures with a row per form: what each reached and sent, at the rates and in the lengths that were tried."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import head, new_figure, plain_log, show_metric
from experiments.reports.forms import SHARES, at_best_rate
from experiments.reports.measures import metric_of
from experiments.reports.names import in_legend
from experiments.reports.plot_style import (
    BLACK,
    PAGE_INCHES,
    PALETTE,
    TARGET_LINE,
    LineSettings,
    highlight,
    plain,
    style,
)

FORM = ["density", "sparsifier", "form"]
RING: LineSettings = {"marker": "o", "markersize": 3.0, "markerfacecolor": "none", "markeredgewidth": 0.6}
MARKS = dict(zip([f"{100 * share:g}" for share in SHARES], "osD", strict=True))  # percent of dense's end


@style()
def draw_forms(rows: pd.DataFrame, title: str) -> Figure:
    """A row per form, the best on top: the measure, and the bytes sent.

    Of a form that was tried at several rates the best is drawn with the range of its seeds, the others as rings.
    """
    metric, best = metric_of(rows["metric"]), at_best_rate(rows)
    has_one_rate = rows["rate"].nunique() < 2
    figure, (left, right) = _figure_of_rows([_name(row, rows, has_one_rate) for _, row in best.iterrows()], panels=2)
    for height, (_, row) in enumerate(best.iterrows()):
        color = highlight(str(row["sparsifier"]))
        others = rows[(rows[FORM] == row[FORM]).all(axis=1) & (rows["rate"] != row["rate"])]
        left.plot(others["value"], [height] * len(others), color=color, linestyle="none", **RING)
        _draw_range(left, height, row, color)
        right.plot(row["total_bytes"], height, color=color, marker="o")
    handles = []
    if (dense := best[best["sparsifier"] == "dense"]["value"]).notna().any():
        left.axvline(dense.max() if metric.higher_is_better else dense.min(), **TARGET_LINE)
        handles.append(Line2D([], [], label="dense, at the best of its rates", **TARGET_LINE))
    if len(rows) > len(best):
        handles.append(Line2D([], [], label="the form at its other rates", color=BLACK, linestyle="none", **RING))
    show_metric(left.xaxis, metric)
    right.set(xlabel="sent by a worker")
    _show_bytes(right)
    head(figure, f"{title}: mean and range over seeds", handles)
    return figure


@style()
def draw_by_epochs(rows: pd.DataFrame, title: str) -> Figure:
    """A row per form, and a mark with its range per length of the training and number of workers."""
    named = rows.assign(name=[f"{in_legend(row['sparsifier'])}, {row['form']}" for _, row in rows.iterrows()])
    names = list(named.sort_values(["epochs", "value"]).drop_duplicates("name")["name"])
    figure, (axes,) = _figure_of_rows(names)
    handles = []
    for ((epochs, workers), own), color in zip(named.groupby(["epochs", "world_size"]), PALETTE, strict=False):
        for _, row in own.iterrows():
            _draw_range(axes, names.index(row["name"]), row, color)
        length = "1 pass" if epochs == 1 else f"{epochs} passes"
        text = f"{length}, {workers} workers (n={own['num_seeds'].max():g})"
        handles.append(Line2D([], [], label=text, color=color, marker="o", linestyle="none"))
    axes.set_xlabel(metric_of(rows["metric"]).label)
    head(figure, f"{title}: mean and range over seeds", handles)
    return figure


@style()
def draw_bytes(rows: pd.DataFrame, title: str) -> Figure:
    """A row per form, the fewest bytes on top: what a worker had sent when it came to shares of dense's end.

    A mark is full where all seeds came there, hollow where some did, and missing where none did.
    """
    rows = rows.sort_values([f"bytes_{share}" for share in MARKS], na_position="last")
    figure, (axes,) = _figure_of_rows([_name(row, rows, has_one_rate=True) for _, row in rows.iterrows()])
    for height, (_, row) in enumerate(rows.iterrows()):
        color = highlight(str(row["sparsifier"]))
        axes.plot([row[f"bytes_{share}"] for share in MARKS], [height] * len(MARKS), color=color, linewidth=0.6)
        for share, marker in MARKS.items():
            face = color if row[f"num_{share}"] == row["num_seeds"] else "white"
            axes.plot(row[f"bytes_{share}"], height, color=color, marker=marker, markerfacecolor=face)
    axes.set_xlabel("sent by a worker until then")
    _show_bytes(axes)
    handles = [
        Line2D([], [], label=f"{share} % of dense's end", color=BLACK, marker=marker, linestyle="none")
        for share, marker in MARKS.items()
    ]
    head(figure, title, handles)
    return figure


def _figure_of_rows(names: Sequence[str], panels: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a named row for each, the first on top, and its panels."""
    figure = new_figure(PAGE_INCHES, 1.0 + 0.17 * len(names))
    grid = figure.subplots(1, panels, sharey=True, squeeze=False, width_ratios=[3, 2][:panels])[0]
    grid[0].set_yticks(range(len(names)), [plain(name) for name in names])
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    return figure, list(grid)


def _draw_range(axes: Axes, height: int, row: pd.Series, color: str) -> None:
    axes.hlines(height, row["low"], row["high"], color=color, linewidth=0.8)
    axes.plot(row["value"], height, color=color, marker="o")


def _show_bytes(axes: Axes) -> None:
    axes.margins(x=0.1)
    plain_log(axes.xaxis)
    low, high = axes.get_xlim()
    if high > 100 * low:
        axes.xaxis.set_major_locator(LogLocator(numticks=4))
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))


def _name(row: pd.Series, rows: pd.DataFrame, has_one_rate: bool) -> str:
    """Return what a form is called, with its density and its rate where there are several."""
    words = [in_legend(str(row["sparsifier"]), str(row["form"]))]
    if row["sparsifier"] != "dense" and rows.loc[rows["sparsifier"] != "dense", "density"].nunique() > 1:
        words.append(f"{row['density']:g}")
    if not has_one_rate:
        words.append(f"rate {row['rate']:g}{f', best of {row.trials}' if row['trials'] > 1 else ''}")
    return ", ".join(words)
