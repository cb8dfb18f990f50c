"""Figures of a comparison with one small panel per method, and a line per stream of gradients or per reference."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator, NullLocator

from experiments.reports.figure_parts import head, new_figure
from experiments.reports.names import in_order, label
from experiments.reports.plot_style import (
    BLACK,
    DASHES,
    GREY,
    PAGE_INCHES,
    PALETTE,
    TARGET_LINE,
    LineSettings,
    highlight,
    style,
)
from experiments.studies.gradient_sources import TITLES
from experiments.studies.selection_times import ONE_READ, TORCH_TOPK

COLUMNS = 5
REFERENCE_LINES: dict[str, LineSettings] = {
    TORCH_TOPK: {"color": BLACK, "linestyle": DASHES[1], "linewidth": 0.8},
    ONE_READ: {"color": GREY, "linestyle": DASHES[2], "linewidth": 0.8},
}


@style()
def draw_density_steps(numbers: pd.DataFrame, title: str) -> Figure:
    """Density / target over steps; columns method, stream, step, build_up.

    Densities below a fiftieth of the target are cut off.
    """

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        axes.axhline(1, **TARGET_LINE)
        _plot_streams(axes, rows, "step", "build_up", markers=False)

    def scale(axes: Axes) -> None:
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))

    streams = _streams(numbers)
    handles = [*_stream_handles(streams, markers=False), Line2D([], [], label="target", **TARGET_LINE)]
    return _panels(numbers, draw, scale, title, handles, ("step", "density / target"))


@style()
def draw_build_up(numbers: pd.DataFrame, title: str) -> Figure:
    """Density / target over the number of workers; columns method, stream, world_size, build_up."""
    sizes = sorted(numbers["world_size"].unique())

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        axes.plot(sizes, sizes, color=GREY, linewidth=0.6)
        axes.axhline(1, **TARGET_LINE)
        _plot_streams(axes, rows, "world_size", "build_up", markers=True)

    extra = [
        Line2D([], [], label="target", **TARGET_LINE),
        Line2D([], [], label="no index shared", color=GREY, linewidth=0.6),
    ]
    handles = [*_stream_handles(_streams(numbers), markers=True), *extra]
    return _panels(numbers, draw, partial(_scale_workers, sizes=sizes), title, handles, ("workers", "density / target"))


@style()
def draw_volume(numbers: pd.DataFrame, title: str) -> Figure:
    """Values of four bytes sent per target index, over workers; columns method, stream, world_size, words_per_k.

    One line is at 6, the bound that Ok-Topk states for itself (arXiv 2201.07598); the other is the sum of all pairs
    of index and value that a worker receives when every worker sends its k to all.
    """
    sizes = sorted(numbers["world_size"].unique())

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        axes.plot(sizes, [2 * (size - 1) for size in sizes], color=GREY, linewidth=0.6)
        axes.axhline(6, **TARGET_LINE)
        _plot_streams(axes, rows, "world_size", "words_per_k", markers=True)

    extra = [
        Line2D([], [], label="6: the bound of Ok-Topk", **TARGET_LINE),
        Line2D([], [], label="2 (workers - 1): k pairs from each", color=GREY, linewidth=0.6),
    ]
    handles = [*_stream_handles(_streams(numbers), markers=True), *extra]
    return _panels(
        numbers, draw, partial(_scale_workers, sizes=sizes), title, handles, ("workers", "bytes sent / (4 k)")
    )


@style()
def draw_selection_times(numbers: pd.DataFrame, title: str) -> Figure:
    """Milliseconds of selection over the length, log-log, a band between quartiles; columns method, numel, TIMES.

    The references are among the methods, and drawn in every panel.
    """
    references = {name: numbers[numbers["method"] == name] for name in REFERENCE_LINES}
    methods = numbers[~numbers["method"].isin(REFERENCE_LINES)]

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        for name, line in references.items():
            axes.plot(line["numel"], 1e3 * line["select_s"], **REFERENCE_LINES[name])
            draw_spread(axes, line, REFERENCE_LINES[name]["color"])
        color = highlight(rows["method"].iloc[0])
        axes.plot(rows["numel"], 1e3 * rows["select_s"], color=color, marker="o", linestyle="-")
        draw_spread(axes, rows, color)

    def scale(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(LogFormatterSciNotation())

    handles = [Line2D([], [], label="the method's selection", color=BLACK, marker="o")]
    handles += [Line2D([], [], label=name, **line) for name, line in REFERENCE_LINES.items()]
    return _panels(methods, draw, scale, title, handles, ("elements d", "ms"))


def draw_spread(axes: Axes, rows: pd.DataFrame, color: Any) -> None:
    """Draw a band between the quartiles of times in milliseconds; columns numel, TIMES."""
    low, high = 1e3 * rows["select_s_low"], 1e3 * rows["select_s_high"]
    axes.fill_between(rows["numel"], low, high, color=color, alpha=0.2, linewidth=0)


def _panels(
    numbers: pd.DataFrame,
    draw: Callable[[Axes, pd.DataFrame], None],
    scale: Callable[[Axes], None],
    title: str,
    handles: Sequence[Line2D],
    axis_labels: tuple[str, str],
) -> Figure:
    """Draw one small panel per method on common axes.

    Args:
        draw: draws a method's rows in its panel.
        scale: sets the scales and ticks of one panel, which are those of all: once, for each call passes over all.
    """
    methods = in_order(numbers["method"])
    num_rows = math.ceil(len(methods) / COLUMNS)
    columns = math.ceil(len(methods) / num_rows)
    figure = new_figure(PAGE_INCHES, 1.0 + 1.05 * num_rows)
    grid = figure.subplots(num_rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, method in zip(grid.flat, methods, strict=False):
        draw(axes, numbers[numbers["method"] == method])
        axes.set_title(label(method), fontsize=6.5)
    scale(grid[0, 0])
    _limit_ticks(grid[0, 0])
    for axis in (grid[0, 0].xaxis, grid[0, 0].yaxis):
        axis.set_minor_locator(NullLocator())  # panels are small
    for axes in grid.flat[len(methods) :]:
        axes.remove()
    for column in range(columns):
        lowest = [grid[row, column] for row in range(num_rows) if row * columns + column < len(methods)][-1]
        lowest.xaxis.set_tick_params(labelbottom=True)
    figure.supxlabel(axis_labels[0], fontsize=8)
    figure.supylabel(axis_labels[1], fontsize=8)
    head(figure, title, handles)
    return figure


def _scale_workers(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes if len(sizes) <= 4 else sizes[::2], labels=None)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _limit_ticks(axes: Axes) -> None:
    """Write the common y axis as plain numbers, few of them: panels are low."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(max(low, 0.02 if axes.get_xscale() == "linear" else low), high)
        axes.yaxis.set_major_locator(LogLocator(subs=_ticks_of_a_decade(high / low), numticks=5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _ticks_of_a_decade(span: float) -> tuple[float, ...]:
    if span > 300:
        return (1,)
    return (1, 3) if span > 30 else (1, 2, 5)


def _streams(numbers: pd.DataFrame) -> list[str]:
    present = set(numbers["stream"])
    return [stream for stream in TITLES if stream in present]


def _plot_streams(axes: Axes, rows: pd.DataFrame, x: str, y: str, *, markers: bool) -> None:
    for stream in _streams(rows):
        line = rows[rows["stream"] == stream].sort_values(x)
        axes.plot(line[x], line[y], **_stream_line(stream, markers=markers))


def _stream_handles(streams: Sequence[str], *, markers: bool) -> list[Line2D]:
    return [Line2D([], [], label=TITLES[stream], **_stream_line(stream, markers=markers)) for stream in streams]


def _stream_line(stream: str, *, markers: bool) -> LineSettings:
    place = list(TITLES).index(stream)
    line: LineSettings = {"color": PALETTE[place], "linestyle": DASHES[place % len(DASHES)], "linewidth": 0.8}
    return line | ({"marker": "osv^Dp"[place], "markersize": 2.5} if markers else {})
