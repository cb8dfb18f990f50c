"""Figures of a comparison that show all methods on common axes: error against bytes, error over compression."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reports.figure_parts import handles_of, head, new_figure, plain_log
from experiments.reports.names import in_order, label
from experiments.reports.plot_style import (
    ALWAYS,
    BLACK,
    FREE,
    LIGHT,
    MARKERS,
    PAGE_INCHES,
    LineSettings,
    lines_of,
    style,
)
from experiments.studies.method_comparison.numbers import front, front_methods

FLOOR = 0.01  # errors below are drawn here: an exact method has none, and no place on a logarithmic axis
PUBLISHED = "_published"  # ends the name of a published form, after the method
MOST_NAMED = 12  # of more methods most are grey: nobody finds fifty marks in a legend
REFERENCES = ("dense", "micro", "topk")  # have a mark wherever they lie
OTHERS: LineSettings = {"color": LIGHT, "marker": "o", "linestyle": "none", "zorder": 1.0}
PANELS = {
    "step_error": "error of one update, mean over steps",
    "cumulative_error": "error of the sum of all updates",
}


@style()
def draw_front(numbers: pd.DataFrame, title: str) -> Figure:
    """Error against bytes sent, a point per method, and the line of those that no other beats in both.

    Of many methods those on the line of either panel, dense, MiCRO and top-k have a mark of their own; others are grey.

    Args:
        numbers: columns method, bytes_share, step_error, cumulative_error.
    """
    figure = new_figure(PAGE_INCHES, 4.4)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    sending = numbers[numbers["bytes_share"] > 0]
    drawn = sending.set_index("method").loc[in_order(sending["method"])].reset_index()
    drawn[list(PANELS)] = drawn[list(PANELS)].clip(lower=FLOOR)
    marks = _marks(drawn)
    for axes, (error, text) in zip(panels, PANELS.items(), strict=True):
        finite = drawn[np.isfinite(drawn[error])]
        best = front(list(zip(finite["bytes_share"], finite[error], strict=True)))
        axes.plot([x for x, _ in best], [y for _, y in best], color=BLACK, linewidth=0.7, zorder=1.5)
        for _, row in finite.iterrows():
            axes.plot(row["bytes_share"], row[error], **marks.get(row["method"], OTHERS))
        axes.set(xscale="log", yscale="log", xlabel="bytes sent / bytes of the dense all-reduce")
        axes.set_title(text, loc="left")
    panels[0].set_ylabel(f"relative error ({FLOOR:g}: or less)")
    handles = [Line2D([], [], label="front: none better in both", color=BLACK, linewidth=0.7)]
    handles += [Line2D([], [], label=label(method), **mark) for method, mark in marks.items()]
    if others := len(drawn) - len(marks):
        handles.append(Line2D([], [], label=f"{others} others, in the table", **OTHERS))
    head(figure, title, handles)
    return figure


def _marks(rows: pd.DataFrame) -> dict[str, LineSettings]:
    """Return the mark of each method that has one of its own, hollow for a published form."""
    methods = list(rows["method"])
    if len(methods) > MOST_NAMED:
        named = {method for error in PANELS for method in front_methods(rows, error)} | set(REFERENCES)
        methods = [method for method in methods if method in named]
    marks: dict[str, LineSettings] = {}
    for place, method in enumerate(methods):
        color = ALWAYS.get(method, FREE[(place + place // len(MARKERS)) % len(FREE)])
        face = "none" if method.endswith(PUBLISHED) else color
        marker = MARKERS[place % len(MARKERS)]
        marks[method] = {
            "color": color,
            "marker": marker,
            "markerfacecolor": face,
            "linestyle": "none",
            "markersize": 5,
        }
    return marks


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
