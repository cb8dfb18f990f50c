"""Figures of a comparison with one small panel per method, and a line per stream of gradients or per reference."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
LOWEST = 0.02  # density / target below is cut off where it is drawn over steps
GUIDE: LineSettings = {"color": GREY, "linewidth": 0.6}
REFERENCE_LINES: dict[str, LineSettings] = {
    TORCH_TOPK: {"color": BLACK, "linestyle": DASHES[1], "linewidth": 0.8},
    ONE_READ: {"color": GREY, "linestyle": DASHES[2], "linewidth": 0.8},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A figure of lines per stream.

    Attributes:
        x, y: columns; x is step or world_size.
        names: of the two axes.
        level, level_name: a dotted line at one height.
        guide, guide_name: a grey line whose height follows from x; None: there is none.
    """

    x: str
    y: str
    names: tuple[str, str]
    level: float = 1
    level_name: str = "target"
    guide: Callable[[int], int] | None = None
    guide_name: str = ""


DENSITY_STEPS = Kind(x="step", y="build_up", names=("step", "density / target"))
BUILD_UP = Kind(
    x="world_size",
    y="build_up",
    names=("workers", "density / target"),
    guide=lambda workers: workers,
    guide_name="no index shared",
)
VOLUME = Kind(  # the bound that Ok-Topk states for itself, arXiv 2201.07598; all pairs that a worker receives from all
    x="world_size",
    y="words_per_k",
    names=("workers", "bytes sent / (4 k)"),
    level=6,
    level_name="6: the bound of Ok-Topk",
    guide=lambda workers: 2 * (workers - 1),
    guide_name="2 (workers - 1): k pairs from each",
)


@style()
def draw_streams(numbers: pd.DataFrame, kind: Kind, title: str) -> Figure:
    """Draw a panel per method and a line per stream; columns method, stream and those of the kind."""
    figure, panels = _panels(numbers, kind.names)
    places = sorted(numbers[kind.x].unique())
    over_workers = kind.x == "world_size"
    for method, axes in panels.items():
        rows = numbers[numbers["method"] == method]
        if kind.guide:
            axes.plot(places, [kind.guide(place) for place in places], **GUIDE)
        axes.axhline(kind.level, **TARGET_LINE)
        for stream in _streams(rows):
            line = rows[rows["stream"] == stream].sort_values(kind.x)
            axes.plot(line[kind.x], line[kind.y], **_stream_line(stream, markers=over_workers))
    axes = next(iter(panels.values()))
    axes.set_yscale("log")
    if over_workers:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places if len(places) <= 4 else places[::2], labels=None)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        axes.set_ylim(bottom=max(axes.get_ylim()[0], LOWEST))
    handles = [
        Line2D([], [], label=TITLES[stream], **_stream_line(stream, markers=over_workers))
        for stream in _streams(numbers)
    ]
    handles.append(Line2D([], [], label=kind.level_name, **TARGET_LINE))
    if kind.guide:
        handles.append(Line2D([], [], label=kind.guide_name, **GUIDE))
    _finish(figure, axes, title, handles)
    return figure


@style()
def draw_selection_times(numbers: pd.DataFrame, title: str) -> Figure:
    """Milliseconds of selection over the length, log-log, a band between quartiles; columns method, numel, TIMES.

    The references are among the methods, and drawn in every panel.
    """
    figure, panels = _panels(numbers[~numbers["method"].isin(REFERENCE_LINES)], ("elements d", "ms"))
    for method, axes in panels.items():
        own: LineSettings = {"color": highlight(method), "marker": "o", "linestyle": "-"}
        for name, line in [*REFERENCE_LINES.items(), (method, own)]:
            rows = numbers[numbers["method"] == name]
            axes.plot(rows["numel"], 1e3 * rows["select_s"], **line)
            draw_spread(axes, rows, line["color"])
    axes = next(iter(panels.values()))
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_formatter(LogFormatterSciNotation())
    handles = [Line2D([], [], label="the method's selection", color=BLACK, marker="o")]
    handles += [Line2D([], [], label=name, **line) for name, line in REFERENCE_LINES.items()]
    _finish(figure, axes, title, handles)
    return figure


def draw_spread(axes: Axes, rows: pd.DataFrame, color: Any) -> None:
    """Draw a band between the quartiles of times in milliseconds; columns numel, TIMES."""
    low, high = 1e3 * rows["select_s_low"], 1e3 * rows["select_s_high"]
    axes.fill_between(rows["numel"], low, high, color=color, alpha=0.2, linewidth=0)


def _panels(numbers: pd.DataFrame, names: tuple[str, str]) -> tuple[Figure, Mapping[str, Axes]]:
    """Return a figure with one small panel per method, on common axes with these names."""
    methods = in_order(numbers["method"])
    num_rows = math.ceil(len(methods) / COLUMNS)
    columns = math.ceil(len(methods) / num_rows)
    figure = new_figure(PAGE_INCHES, 1.0 + 1.05 * num_rows)
    grid = figure.subplots(num_rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = dict(zip(methods, grid.flat, strict=False))
    for method, axes in panels.items():
        axes.set_title(label(method), fontsize=6.5)
    for axes in grid.flat[len(methods) :]:
        axes.remove()
    for axes in list(panels.values())[-columns:]:  # the lowest of each column
        axes.xaxis.set_tick_params(labelbottom=True)
    figure.supxlabel(names[0], fontsize=8)
    figure.supylabel(names[1], fontsize=8)
    return figure, panels


def _finish(figure: Figure, axes: Axes, title: str, handles: Sequence[Line2D]) -> None:
    """Write the common y axis, which is logarithmic, as few plain numbers, for panels are low; add title and legend."""
    low, high = axes.get_ylim()
    span = high / low
    ticks = (1,) if span > 300 else (1, 3) if span > 30 else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=ticks, numticks=5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    head(figure, title, handles)


def _streams(numbers: pd.DataFrame) -> list[str]:
    present = set(numbers["stream"])
    return [stream for stream in TITLES if stream in present]


def _stream_line(stream: str, *, markers: bool) -> LineSettings:
    place = list(TITLES).index(stream)
    line: LineSettings = {"color": PALETTE[place], "linestyle": DASHES[place % len(DASHES)], "linewidth": 0.8}
    return line | ({"marker": "osv^Dp"[place], "markersize": 2.5} if markers else {})
