"""Figures of a comparison of all methods: one small panel per method, or one labelled point per method."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator, NullFormatter

from experiments.reports.figures import TARGET_LINE, LineSettings
from experiments.reports.label_placement import front, name_points
from experiments.reports.names import in_order, label
from experiments.reports.plot_style import (
    BLACK,
    DASHES,
    GREY,
    PAGE_INCHES,
    PALETTE,
    head,
    look,
    new_figure,
    plain_log,
    style,
)
from experiments.studies.gradient_sources import TITLES

COLUMNS = 5
FLOOR = 0.01  # errors below are drawn here: an exact method has none, and no place on a logarithmic axis
PUBLISHED = "_published"  # what the yaml of a published form is called, after the method
REFERENCES: dict[str, LineSettings] = {
    "torch.topk": {"color": BLACK, "linestyle": DASHES[1], "linewidth": 0.8},
    "one read": {"color": GREY, "linestyle": DASHES[2], "linewidth": 0.8},
}


@style()
def draw_density_steps(numbers: pd.DataFrame, title: str) -> Figure:
    """Density / asked over steps, a panel per method, a line per stream. Columns method, stream, step, build_up.

    What is below a fiftieth of what was asked for is cut off.
    """

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        axes.axhline(1, **TARGET_LINE)
        _draw_streams(axes, rows, "step", "build_up", markers=False)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))

    streams = _streams(numbers)
    handles = [*_stream_handles(streams, markers=False), Line2D([], [], label="asked", **TARGET_LINE)]
    return _panels(numbers, draw, title, handles, ("step", "density / asked"))


@style()
def draw_build_up(numbers: pd.DataFrame, title: str) -> Figure:
    """Density / asked over the number of workers; columns method, stream, world_size, build_up."""
    sizes = sorted(numbers["world_size"].unique())

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        axes.plot(sizes, sizes, color=GREY, linewidth=0.6)
        axes.axhline(1, **TARGET_LINE)
        _draw_streams(axes, rows, "world_size", "build_up", markers=True)
        axes.set_yscale("log")
        _scale_workers(axes, sizes)

    extra = [
        Line2D([], [], label="asked", **TARGET_LINE),
        Line2D([], [], label="no index shared", color=GREY, linewidth=0.6),
    ]
    handles = [*_stream_handles(_streams(numbers), markers=True), *extra]
    return _panels(numbers, draw, title, handles, ("workers", "density / asked"))


@style()
def draw_volume(numbers: pd.DataFrame, title: str) -> Figure:
    """Values of four bytes sent per index asked for, over workers; columns method, stream, world_size, words_per_k.

    One line is at 6, the bound that Ok-Topk states for itself (arXiv 2201.07598); the other is the sum of all pairs
    of index and value that a worker receives when every worker sends its k to all.
    """
    sizes = sorted(numbers["world_size"].unique())

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        axes.plot(sizes, [2 * (size - 1) for size in sizes], color=GREY, linewidth=0.6)
        axes.axhline(6, **TARGET_LINE)
        _draw_streams(axes, rows, "world_size", "words_per_k", markers=True)
        axes.set_yscale("log")
        _scale_workers(axes, sizes)

    extra = [
        Line2D([], [], label="6: the bound of Ok-Topk", **TARGET_LINE),
        Line2D([], [], label="2 (workers - 1): k pairs from each", color=GREY, linewidth=0.6),
    ]
    handles = [*_stream_handles(_streams(numbers), markers=True), *extra]
    return _panels(numbers, draw, title, handles, ("workers", "bytes sent / (4 k)"))


@style()
def draw_tradeoff(numbers: pd.DataFrame, title: str) -> Figure:
    """Error of one update over compression, a line per method, log-log; columns method, compression, step_error."""
    figure = new_figure(PAGE_INCHES, 3.6)
    axes = figure.subplots()
    handles = []
    for method in in_order(numbers["method"]):
        rows = numbers[numbers["method"] == method].sort_values("compression")
        own = look(method)
        line: LineSettings = {"color": own.color, "linestyle": own.dashes, "marker": own.marker}
        axes.plot(rows["compression"], rows["step_error"].clip(lower=FLOOR), **line)
        handles.append(Line2D([], [], label=own.name, **line))
    axes.set(xlabel="compression: bytes of the dense all-reduce / bytes sent", ylabel="||update - mean|| / ||mean||")
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    head(figure, title, handles)
    return figure


@style()
def draw_selection_times(numbers: pd.DataFrame, title: str) -> Figure:
    """Milliseconds of selection over the length, log-log; columns method, numel, select_s, and the REFERENCES."""
    references = {name: numbers[numbers["method"] == name] for name in REFERENCES}
    methods = numbers[~numbers["method"].isin(REFERENCES)]

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        for name, line in references.items():
            axes.plot(line["numel"], 1e3 * line["select_s"], **REFERENCES[name])
        method = look(rows["method"].iloc[0])
        axes.plot(rows["numel"], 1e3 * rows["select_s"], color=method.color, marker=method.marker, linestyle="-")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(LogFormatterSciNotation())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())

    handles = [Line2D([], [], label="the method's selection", color=BLACK, marker="o")]
    handles += [Line2D([], [], label=name, **line) for name, line in REFERENCES.items()]
    return _panels(methods, draw, title, handles, ("elements d", "ms"))


@style()
def draw_front(numbers: pd.DataFrame, title: str) -> Figure:
    """Error against bytes sent, a point per method, and the line of those that no other beats in both.

    Args:
        numbers: columns method, bytes_share, step_error, cumulative_error.
    """
    figure = new_figure(PAGE_INCHES, 8.4)
    panels = figure.subplots(2, 1, sharex=True)
    sending = numbers[numbers["bytes_share"] > 0]
    drawn = sending.set_index("method").loc[in_order(sending["method"])].reset_index()
    titles = {
        "step_error": "error of one update: ||update - mean|| / ||mean||, mean over steps",
        "cumulative_error": "error of the sum of all updates, at the last step",
    }
    handles = [Line2D([], [], label="no method sends less at a smaller error", color=BLACK, linewidth=0.7)]
    if drawn["method"].str.endswith(PUBLISHED).any():
        hollow: LineSettings = {"color": BLACK, "marker": "o", "markerfacecolor": "none", "linestyle": "none"}
        handles.append(Line2D([], [], label="published form of the same mark; named on the front alone", **hollow))
    head(figure, title, handles)
    placings = [
        _draw_front(axes, drawn, error, text) for axes, (error, text) in zip(panels, titles.items(), strict=True)
    ]
    panels[-1].set_xlabel("bytes sent / bytes of the dense all-reduce")
    figure.draw_without_rendering()  # settles the layout that names are placed in
    for place in placings:
        place()
    return figure


def _draw_front(axes: Axes, rows: pd.DataFrame, error: str, text: str) -> Callable[[], None]:
    """Draw one panel and return what writes the names once the layout is settled."""
    finite = rows[np.isfinite(rows[error])]
    points = [(float(x), max(float(y), FLOOR)) for x, y in zip(finite["bytes_share"], finite[error], strict=True)]
    best = front(points)
    axes.plot([x for x, _ in best], [y for _, y in best], color=BLACK, linewidth=0.7, zorder=1)
    looks = [look(method) for method in finite["method"]]
    published = [str(method).endswith(PUBLISHED) for method in finite["method"]]
    for point, method, hollow in zip(points, looks, published, strict=True):
        face = "none" if hollow else method.color
        axes.plot(*point, color=method.color, marker=method.marker, markerfacecolor=face, linestyle="none", zorder=2)
    names = [
        "" if hollow and point not in best else method.name
        for point, method, hollow in zip(points, looks, published, strict=True)
    ]
    axes.set(xscale="log", yscale="log", ylabel=f"relative error ({FLOOR:g}: or less)")
    axes.set_title(text, loc="left")
    _widen(axes)
    return lambda: name_points(axes, points, names, [method.color for method in looks], best)


def _widen(axes: Axes) -> None:
    """Give the logarithmic axes room for the names of the outermost points."""
    for limits, set_limits in ((axes.get_xlim(), axes.set_xlim), (axes.get_ylim(), axes.set_ylim)):
        low, high = np.log10(limits)
        room = 0.12 * (high - low) + 0.05
        set_limits(10 ** (low - room), 10 ** (high + room))


def _panels(
    numbers: pd.DataFrame,
    draw: Callable[[Axes, pd.DataFrame], None],
    title: str,
    handles: Sequence[Line2D],
    names: tuple[str, str],
) -> Figure:
    """Draw one small panel per method on common axes."""
    methods = in_order(numbers["method"])
    num_rows = math.ceil(len(methods) / COLUMNS)
    columns = math.ceil(len(methods) / num_rows)
    figure = new_figure(PAGE_INCHES, 1.0 + 1.05 * num_rows)
    grid = figure.subplots(num_rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, method in zip(grid.flat, methods, strict=False):
        draw(axes, numbers[numbers["method"] == method])
        axes.set_title(label(method), fontsize=6.5)
    _limit_ticks(grid[0, 0])
    for axes in grid.flat[len(methods) :]:
        axes.remove()
    for column in range(columns):
        lowest = [grid[row, column] for row in range(num_rows) if row * columns + column < len(methods)][-1]
        lowest.xaxis.set_tick_params(labelbottom=True)
    figure.supxlabel(names[0], fontsize=8)
    figure.supylabel(names[1], fontsize=8)
    head(figure, title, handles)
    return figure


def _scale_workers(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes if len(sizes) <= 4 else sizes[::2], labels=None)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _limit_ticks(axes: Axes) -> None:
    """Write the common y axis as plain numbers, few of them: panels are low."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(max(low, 0.02 if axes.get_xscale() == "linear" else low), high)
        axes.yaxis.set_major_locator(LogLocator(subs=_ticks_of_a_decade(high / low), numticks=5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _ticks_of_a_decade(span: float) -> tuple[float, ...]:
    if span > 300:
        return (1,)
    return (1, 3) if span > 30 else (1, 2, 5)


def _streams(numbers: pd.DataFrame) -> list[str]:
    present = set(numbers["stream"])
    return [stream for stream in TITLES if stream in present]


def _draw_streams(axes: Axes, rows: pd.DataFrame, x: str, y: str, *, markers: bool) -> None:
    for stream in _streams(rows):
        line = rows[rows["stream"] == stream].sort_values(x)
        axes.plot(line[x], line[y], **_stream_line(stream, markers=markers))


def _stream_handles(streams: Sequence[str], *, markers: bool) -> list[Line2D]:
    return [Line2D([], [], label=TITLES[stream], **_stream_line(stream, markers=markers)) for stream in streams]


def _stream_line(stream: str, *, markers: bool) -> LineSettings:
    place = list(TITLES).index(stream)
    line: LineSettings = {"color": PALETTE[place], "linestyle": DASHES[place % len(DASHES)], "linewidth": 0.8}
    return line | ({"marker": "osv^Dp"[place], "markersize": 2.5} if markers else {})


def front_methods(rows: pd.DataFrame, error: str) -> list[str]:
    """Return the methods on the front of ``error`` against bytes, the one that sends least first."""
    finite = rows[np.isfinite(rows[error]) & (rows["bytes_share"] > 0)]
    places: Mapping[tuple[float, float], str] = {
        (x, y): method for method, x, y in zip(finite["method"], finite["bytes_share"], finite[error], strict=True)
    }
    return [places[point] for point in front(places)]
