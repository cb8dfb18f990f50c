"""Draw a comparison: a small panel per method, or all methods on common axes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator, NullLocator

from experiments.reports import figure_parts as parts
from experiments.reports import plot_style as look
from experiments.reports.figure_parts import Panel
from experiments.reports.names import in_legend, in_order
from experiments.reports.plot_style import LineSettings, style
from experiments.tools.compare.numbers import front, front_methods
from experiments.tools.shared.drawings import named_lines
from experiments.tools.shared.gradient_sources import TITLES
from experiments.tools.shared.selection_times import ONE_READ, TORCH_TOPK

COLUMNS = 5
LOWEST = 0.02  # lower limit of density / target in figures over steps
FLOOR = 0.01  # smaller errors are drawn here: zero has no place on a logarithmic axis
MOST_NAMED = 12  # with more methods, most are grey: fifty marks in a legend are unreadable
ALWAYS_NAMED = ("dense", "micro", "topk")
GUIDE: LineSettings = {"color": look.GREY, "linewidth": 0.6}
FRONT: LineSettings = {"color": look.BLACK, "linewidth": 0.7, "zorder": 1.5}
OTHERS: LineSettings = {"color": look.LIGHT, "marker": "o", "linestyle": "none", "zorder": 1.0}
REFERENCE_LINES: dict[str, LineSettings] = {
    TORCH_TOPK: {"color": look.BLACK, "linestyle": look.DASHES[1], "linewidth": 0.8},
    ONE_READ: {"color": look.GREY, "linestyle": look.DASHES[2], "linewidth": 0.8},
}
ERRORS = {
    "step_error": "error of one update, mean over steps",
    "cumulative_error": "error of the sum of all updates",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A figure with a line per stream: two columns, names of axes, a dotted level, a grey guide."""

    x: str = "world_size"
    y: str = "build_up"
    names: tuple[str, str] = ("workers", "density / target")
    level: float = 1
    level_name: str = "target"
    guide: Callable[[int], int] | None = None
    guide_name: str = ""


DENSITY_STEPS = Kind(x="step", names=("step", "density / target"))
BUILD_UP = Kind(guide=lambda workers: workers, guide_name="no index shared")
VOLUME = Kind(  # Ok-Topk's bound, arXiv 2201.07598, and the pairs that a worker receives from all
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
    places, over_workers = sorted(numbers[kind.x].unique()), kind.x == "world_size"
    present = [stream for stream in TITLES if stream in set(numbers["stream"])]
    streams = {(stream,): _stream_line(stream, markers=over_workers) for stream in present}
    lines = named_lines(["stream"], streams, TITLES.__getitem__)
    for method, axes in panels.items():
        if kind.guide:
            axes.plot(places, [kind.guide(place) for place in places], **GUIDE)
        axes.axhline(kind.level, **look.TARGET_LINE)
        panel = Panel(x=kind.x, y=kind.y, x_name=axes.get_xlabel())
        panel.draw(axes, numbers[numbers["method"] == method], lines)
    axes = next(iter(panels.values()))
    axes.set_yscale("log")
    if over_workers:
        parts.show_values(axes.xaxis, places if len(places) <= 4 else places[::2])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        axes.set_ylim(bottom=max(axes.get_ylim()[0], LOWEST))
    _few_ticks(axes)
    beside = {kind.level_name: look.TARGET_LINE} | ({kind.guide_name: GUIDE} if kind.guide else {})
    parts.head(figure, title, [*lines.handles, *parts.handles_of(beside)])
    return figure


@style()
def draw_selection_times(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw milliseconds of selection over the length, log-log, with quartiles; columns method, numel, TIMES.

    The references are among the methods, and appear in every panel.
    """
    figure, panels = _panels(numbers[~numbers["method"].isin(REFERENCE_LINES)], ("elements d", "ms"))
    for method, axes in panels.items():
        own: LineSettings = {"color": look.highlight(method), "marker": "o", "linestyle": "-"}
        for name, line in [*REFERENCE_LINES.items(), (method, own)]:
            draw_times(axes, numbers[numbers["method"] == name], line)
    axes = next(iter(panels.values()))
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_formatter(LogFormatterSciNotation())
    axes.xaxis.set_minor_locator(NullLocator())
    _few_ticks(axes)
    names = {"the method's selection": {"color": look.BLACK, "marker": "o"}} | REFERENCE_LINES
    parts.head(figure, title, parts.handles_of(names))
    return figure


def draw_times(axes: Axes, rows: pd.DataFrame, line: LineSettings) -> None:
    """Draw times in milliseconds over the length, with quartiles; columns numel, TIMES."""
    if line is REFERENCE_LINES[ONE_READ]:  # a straight line: the highest speed at all lengths
        fastest = rows["numel"] * (rows["select_s"] / rows["numel"]).min()
        rows = rows.assign(select_s=fastest, select_s_low=fastest, select_s_high=fastest)
    middle, low, high = (1e3 * rows[column] for column in ("select_s", "select_s_low", "select_s_high"))
    parts.draw_band(axes, rows["numel"], middle, low, high, line)


@style()
def draw_front(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw error against bytes sent, a point per method, and the Pareto front.

    With many methods, only those on a front, dense, MiCRO and top-k have their own marks; others are grey. Columns
    method, bytes_share, step_error, cumulative_error.
    """
    figure = parts.new_figure(look.PAGE_INCHES, 4.4)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    sending = numbers[numbers["bytes_share"] > 0]
    drawn = sending.set_index("method").loc[in_order(sending["method"])].reset_index()
    drawn[list(ERRORS)] = drawn[list(ERRORS)].clip(lower=FLOOR)
    marks = _marks(drawn)
    for axes, (error, text) in zip(panels, ERRORS.items(), strict=True):
        finite = drawn[np.isfinite(drawn[error])]
        axes.plot(*zip(*front(list(zip(finite["bytes_share"], finite[error], strict=True))), strict=True), **FRONT)
        for _, row in finite.iterrows():
            axes.plot(row["bytes_share"], row[error], **marks.get(row["method"], OTHERS))
        axes.set(xlabel="bytes sent / bytes of the dense all-reduce")
        axes.set_title(text, loc="left")
        parts.plain_log(axes.xaxis)
        parts.plain_log(axes.yaxis)
    panels[0].set_ylabel(f"relative error ({FLOOR:g}: or less)")
    names = {"front: none better in both": FRONT} | {in_legend(method): mark for method, mark in marks.items()}
    if others := len(drawn) - len(marks):
        names[f"{others} others, in the table"] = OTHERS
    parts.head(figure, title, parts.handles_of(names))
    return figure


@style()
def draw_tradeoff(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw the error of one update over compression, a line per method; columns method, compression, step_error."""
    x_name, y_name = "compression: bytes of the dense all-reduce / bytes sent", "||update - mean|| / ||mean||"
    panel = Panel(x="compression", y="step_error", x_name=x_name, y_name=y_name)
    lines = named_lines(["method"], look.lines_of((method,) for method in in_order(numbers["method"])))
    seen = numbers.assign(step_error=numbers["step_error"].clip(lower=FLOOR))
    panel = replace(panel, show_x=parts.plain_log, show_y=parts.plain_log)
    return parts.figure_of_lines(title, seen, [panel], lines, height=3.6)


def _panels(numbers: pd.DataFrame, names: tuple[str, str]) -> tuple[Figure, Mapping[str, Axes]]:
    """Return a figure with a small panel per method, on common axes with these names."""
    methods = in_order(numbers["method"])
    num_rows = -(-len(methods) // COLUMNS)
    named = {in_legend(method): method for method in methods}
    columns = -(-len(methods) // num_rows)
    figure, panels = parts.figure_of_panels(list(named), columns=columns, height=1.05)
    for axes in list(panels.values())[-columns:]:  # the figure's own label has the notes below it
        axes.set_xlabel(names[0])
    figure.supylabel(names[1], fontsize=8)
    return figure, {named[name]: axes for name, axes in panels.items()}


def _few_ticks(axes: Axes) -> None:
    """Label a logarithmic y axis with few plain numbers, since panels are low."""
    low, high = axes.get_ylim()
    ticks = (1,) if high / low > 300 else (1, 3) if high / low > 30 else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=ticks, numticks=5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _stream_line(stream: str, *, markers: bool) -> LineSettings:
    place = list(TITLES).index(stream)
    line: LineSettings = {"color": look.PALETTE[place], "linestyle": look.DASHES[place % len(look.DASHES)]}
    return line | {"linewidth": 0.8} | ({"marker": "osv^Dp"[place], "markersize": 2.5} if markers else {})


def _marks(rows: pd.DataFrame) -> dict[str, LineSettings]:
    """Return the marks of methods that have one, hollow for published rules."""
    methods: Sequence[str] = list(rows["method"])
    if len(methods) > MOST_NAMED:
        named = {method for error in ERRORS for method in front_methods(rows, error)} | set(ALWAYS_NAMED)
        methods = [method for method in methods if method in named]
    marks: dict[str, LineSettings] = {}
    free = [(look.FREE[n % len(look.FREE)], look.MARKERS[n % len(look.MARKERS)]) for n in range(2 * MOST_NAMED)]
    for method in methods:
        own = look.HOME.get(method, free[0])
        color, mark = free.pop(0) if own in [(line["color"], line["marker"]) for line in marks.values()] else own
        marks[method] = {"color": color, "marker": mark, "markersize": 5}
        marks[method] |= {"linestyle": "none", "markerfacecolor": "none" if method.endswith("_published") else color}
    return marks
