"""Figures of a comparison that show all methods on common axes: error against bytes, error over compression."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reports.figure_parts import handles_of, head, new_figure, plain_log
from experiments.reports.label_placement import name_points
from experiments.reports.names import in_order, label
from experiments.reports.plot_style import BLACK, LIGHT, PAGE_INCHES, LineSettings, highlight, lines_of, plain, style
from experiments.studies.method_comparison.numbers import front, front_methods

FLOOR = 0.01  # errors below are drawn here: an exact method has none, and no place on a logarithmic axis
PUBLISHED = "_published"  # ends the name of a published form, after the method
MOST_NAMED = 12  # of more methods most are grey: names of fifty points hide what they name
REFERENCES = ("dense", "micro", "topk")  # named wherever they lie
PANELS = {
    "step_error": "error of one update: ||update - mean|| / ||mean||, mean over steps",
    "cumulative_error": "error of the sum of all updates, at the last step",
}


@style()
def draw_front(numbers: pd.DataFrame, title: str) -> Figure:
    """Error against bytes sent, a point per method, and the line of those that no other beats in both.

    Of many methods those on the line of either panel, dense, MiCRO and top-k are named, and the others are grey.

    Args:
        numbers: columns method, bytes_share, step_error, cumulative_error.
    """
    figure = new_figure(PAGE_INCHES, 8.4)
    panels = figure.subplots(2, 1, sharex=True)
    sending = numbers[numbers["bytes_share"] > 0]
    drawn = sending.set_index("method").loc[in_order(sending["method"])].reset_index()
    drawn[list(PANELS)] = drawn[list(PANELS)].clip(lower=FLOOR)
    named = _named(drawn)
    handles = [Line2D([], [], label="no method sends less at a smaller error", color=BLACK, linewidth=0.7)]
    if drawn["method"].str.endswith(PUBLISHED).any():
        handles.append(Line2D([], [], label="published form", **_mark(BLACK, "o", is_hollow=True)))
    if others := len(drawn) - len(named):
        handles.append(Line2D([], [], label=f"{others} others, in the table", **_mark(LIGHT, "o", is_hollow=False)))
    head(figure, title, handles)
    placings = [
        _draw_front(axes, drawn, error, text, named) for axes, (error, text) in zip(panels, PANELS.items(), strict=True)
    ]
    panels[-1].set_xlabel("bytes sent / bytes of the dense all-reduce")
    figure.draw_without_rendering()  # settles the layout that names are placed in
    for place in placings:
        place()
    return figure


def _named(rows: pd.DataFrame) -> set[str]:
    """Return the methods whose points are named."""
    if len(rows) <= MOST_NAMED:
        return set(rows["method"])
    on_a_front = {method for error in PANELS for method in front_methods(rows, error)}
    return on_a_front | (set(REFERENCES) & set(rows["method"]))


def _mark(color: str, marker: str, *, is_hollow: bool) -> LineSettings:
    face = "none" if is_hollow else color
    return {"color": color, "marker": marker, "markerfacecolor": face, "linestyle": "none"}


def _draw_front(axes: Axes, rows: pd.DataFrame, error: str, text: str, named: set[str]) -> Callable[[], None]:
    """Draw one panel and return the function that writes the names, to be called once the layout is settled."""
    finite = rows[np.isfinite(rows[error])]
    points = list(zip(finite["bytes_share"].astype(float), finite[error].astype(float), strict=True))
    best = front(points)
    axes.plot([x for x, _ in best], [y for _, y in best], color=BLACK, linewidth=0.7, zorder=1.5)
    colors = [highlight(method) for method in finite["method"]]
    for point, color, method in zip(points, colors, finite["method"], strict=True):
        shown, above = (color, 2.0) if method in named else (LIGHT, 1.0)
        axes.plot(*point, zorder=above, **_mark(shown, "o", is_hollow=method.endswith(PUBLISHED)))
    names = [plain(label(method)) if method in named else "" for method in finite["method"]]
    axes.set(xscale="log", yscale="log", ylabel=f"relative error ({FLOOR:g}: or less)")
    axes.set_title(text, loc="left")
    _widen(axes)
    return lambda: name_points(axes, points, names, colors, best)


def _widen(axes: Axes) -> None:
    """Give the logarithmic axes room for the names of the outermost points."""
    for limits, set_limits in ((axes.get_xlim(), axes.set_xlim), (axes.get_ylim(), axes.set_ylim)):
        low, high = np.log10(limits)
        room = 0.12 * (high - low) + 0.05
        set_limits(10 ** (low - room), 10 ** (high + room))


@style()
def draw_tradeoff(numbers: pd.DataFrame, title: str) -> Figure:
    """Error of one update over compression, a line per method, log-log; columns method, compression, step_error."""
    figure = new_figure(PAGE_INCHES, 3.6)
    axes = figure.subplots()
    lines = lines_of(in_order(numbers["method"]))
    for method, line in lines.items():
        rows = numbers[numbers["method"] == method].sort_values("compression")
        axes.plot(rows["compression"], rows["step_error"].clip(lower=FLOOR), **line)
    axes.set(xlabel="compression: bytes of the dense all-reduce / bytes sent", ylabel="||update - mean|| / ||mean||")
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    head(figure, title, handles_of({label(method): line for method, line in lines.items()}))
    return figure
