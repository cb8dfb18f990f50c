"""Draw the theory of top-k: a panel per vector, or a line per operator."""

from collections.abc import Callable, Mapping
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reports import figure_parts as parts
from experiments.reports import plot_style as look
from experiments.reports.names import in_order
from experiments.reports.plot_style import LineSettings, style
from experiments.tools.compare.figures import REFERENCE_LINES, draw_times

MEASURED: LineSettings = {"color": look.BLUE, "linestyle": "-"}
PREDICTED: LineSettings = {"color": look.VERMILLION, "linestyle": look.DASHES[1]}
HISTOGRAM: LineSettings = {"color": look.BLUE, "alpha": 0.4, "linewidth": 5}  # how the legend shows a histogram
FREQUENCIES = "_of_frequencies"  # suffix of column names
RANDOM: LineSettings = {"color": look.GREY, "linestyle": look.DASHES[2]}


@style()
def draw_histogram(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw the density of values and of the fitted normal; columns vector, value (deviations), density, normal.

    Columns whose names end in FREQUENCIES are drawn in a second row.
    """
    lowest = numbers.loc[numbers["density"] > 0, "density"].min() / 2

    def draw(axes: Axes, rows: pd.DataFrame, end: str) -> None:
        heights, normal = rows[f"density{end}"].clip(lower=lowest), rows[f"normal{end}"]
        axes.fill_between(rows["value"], heights, lowest, step="mid", color=look.BLUE, alpha=0.4)
        axes.plot(rows["value"], normal.where(normal >= lowest), **PREDICTED)
        axes.set_yscale("log")
        axes.set_ylim(bottom=lowest)

    lines: dict[str, LineSettings] = {"measured": HISTOGRAM, "fitted normal": PREDICTED}
    ends = [end for end in ("", FREQUENCIES) if f"density{end}" in numbers]
    draws = {f"density{end.replace('_', ' ')}": partial(draw, end=end) for end in ends}
    return _panels(numbers, draws, title, lines, "(value - mean) / deviation")


@style()
def draw_curve(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw descending squared magnitudes and the line; columns vector, share, pi_squared, line."""

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        axes.plot(rows["share"], rows["pi_squared"], **MEASURED)
        axes.plot(rows["share"], rows["line"], **PREDICTED)
        axes.set_ylim(0, 1.05)

    lines = {"accumulator": MEASURED, "line from (0, 1) to (1, 0)": PREDICTED}
    return _panels(numbers, {"pi² = (|u|₍ᵢ₎ / |u|₍₁₎)²": draw}, title, lines, "place i / d")


@style()
def draw_errors(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw the errors of top-k, bound and random-k, and ratios; columns vector, share, top_k, bound, random_k."""

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        for column, line in (("top_k", MEASURED), ("bound", PREDICTED), ("random_k", RANDOM)):
            axes.plot(rows["share"], rows[column], **line)
        axes.set_ylim(0, 1.05)

    def draw_ratio(axes: Axes, rows: pd.DataFrame) -> None:
        axes.axhline(1, **PREDICTED)
        axes.plot(rows["share"], rows["top_k"] / rows["bound"], **MEASURED)
        axes.set(xscale="log", ylim=(0, None))

    lines = {"top-k": MEASURED, "bound (1 - k/d)²": PREDICTED, "random-k, 1 - k/d": RANDOM}
    return _panels(numbers, {"||u - kept||² / ||u||²": draw, "top-k / bound": draw_ratio}, title, lines, "k / d")


@style()
def draw_operators(numbers: pd.DataFrame, names: Mapping[str, str], title: str) -> Figure:
    """Draw milliseconds over the length, a line per operator, with quartiles; columns method, numel, TIMES."""
    figure = parts.new_figure(look.COLUMN_INCHES, 3.9)
    axes = figure.subplots()
    methods = [name for name in in_order(numbers["method"]) if name not in REFERENCE_LINES]
    lines = REFERENCE_LINES | look.lines_of(methods)
    for method, line in lines.items():
        draw_times(axes, numbers[numbers["method"] == method], line)
    axes.set(xscale="log", yscale="log", xlabel="elements d", ylabel="time (ms)")
    parts.plain_ticks(axes.xaxis)
    parts.plain_ticks(axes.yaxis)
    parts.head(figure, title, parts.handles_of({names.get(method, method): line for method, line in lines.items()}))
    return figure


def _panels(
    numbers: pd.DataFrame,
    draws: Mapping[str, Callable[[Axes, pd.DataFrame], None]],
    title: str,
    lines: Mapping[str, LineSettings],
    x_name: str,
) -> Figure:
    """Draw one column of panels per vector, a row for each name of a y axis; ``lines`` are the legend's."""
    vectors = list(numbers.groupby("vector", sort=False))
    figure = parts.new_figure(look.PAGE_INCHES, 0.8 + 1.7 * len(draws))
    grid = figure.subplots(len(draws), len(vectors), sharey="row", sharex="row", squeeze=False)
    for column, (vector, rows) in zip(grid.T, vectors, strict=True):
        for axes, draw in zip(column, draws.values(), strict=True):
            draw(axes, rows)
        column[0].set_title(vector)
        column[-1].set_xlabel(x_name)
    for axes, name in zip(grid[:, 0], draws, strict=True):
        axes.set_ylabel(name)
    parts.head(figure, title, parts.handles_of(lines))
    figure.get_layout_engine().set(wspace=0.03)  # type: ignore[union-attr, call-arg]
    return figure
