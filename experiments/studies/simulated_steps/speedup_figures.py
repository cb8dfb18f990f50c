"""Figures of speed-ups over workers: of schedules and methods, and of double trees under two slopes."""

import itertools
from collections.abc import Sequence

import pandas as pd
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from experiments.reports.figure_parts import head, new_figure, show_percent
from experiments.reports.names import human
from experiments.reports.plot_style import (
    BLACK,
    COLUMN_INCHES,
    DASHDOT,
    DASHED,
    DASHES,
    DOTTED,
    GREEN,
    GREY,
    LONG,
    MARKERS,
    ORANGE,
    PAGE_INCHES,
    PALETTE,
    PURPLE,
    SKY,
    LineSettings,
    look,
    plain,
    style,
)
from experiments.studies.simulated_steps.labels import schedule_name, way_name
from experiments.studies.simulated_steps.step import DENSE

LINEAR: LineSettings = {"color": GREY, "linestyle": "-", "linewidth": 0.6}
SCHEDULE_LINES: dict[str, LineSettings] = {
    "layerwise": {"color": GREY, "linestyle": DASHED, "marker": "s"},
    "single": {"color": PURPLE, "linestyle": DOTTED, "marker": "^"},
    "mgwfbp": {"color": SKY, "linestyle": DASHDOT, "marker": "v"},
    "exact": {"color": BLACK, "linestyle": "-", "marker": "o"},
    "ddp": {"color": ORANGE, "linestyle": LONG, "marker": "P"},
    "asc": {"color": GREEN, "linestyle": DASHDOT, "marker": "X"},
    "dear": {"color": GREEN, "linestyle": LONG, "marker": "*"},
}


@style()
def draw_speedups(numbers: pd.DataFrame, title: str) -> Figure:
    """Speed-up and efficiency over workers, a column of panels per model.

    Columns model, workers, method, schedule, speedup, efficiency.
    """
    ways = list(dict.fromkeys(zip(numbers["method"], numbers["schedule"], strict=True)))
    models = list(dict.fromkeys(numbers["model"]))
    figure = new_figure(figure_width(models), 5.2)
    grid = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for (upper, lower), model in zip(grid.T, models, strict=True):
        rows = numbers[numbers["model"] == model]
        ends = [rows["workers"].min(), rows["workers"].max()]
        upper.plot(ends, ends, **LINEAR)
        lower.axhline(1, **LINEAR)
        for method, schedule in ways:
            own = rows[(rows["method"] == method) & (rows["schedule"] == schedule)]
            upper.plot(own["workers"], own["speedup"], **_line(method, schedule))
            lower.plot(own["workers"], own["efficiency"], **_line(method, schedule))
        upper.set_title(plain(human(model)))
        upper.set_xscale("log", base=2)
        upper.set_yscale("log", base=2)
        powers_of_four(upper.xaxis)
        powers_of_four(upper.yaxis)
        lower.set(xlabel="workers", ylim=(0, 1.05))
        show_percent(lower)
    grid[0, 0].set_ylabel("speed-up over one worker")
    grid[1, 0].set_ylabel("efficiency (% of linear)")
    handles = [Line2D([], [], label="linear", **LINEAR)]
    head(figure, title, [*handles, *(Line2D([], [], label=way_name(*way), **_line(*way)) for way in ways)])
    return figure


@style()
def draw_trees(numbers: pd.DataFrame, title: str) -> Figure:
    """Efficiency with double trees under two slopes, a row of panels per model.

    Columns model, slope, workers, schedule, efficiency.
    """
    models, slopes = list(dict.fromkeys(numbers["model"])), list(dict.fromkeys(numbers["slope"]))
    schedules = list(dict.fromkeys(numbers["schedule"]))
    figure = new_figure(PAGE_INCHES, 0.9 + 1.7 * len(models))
    grid = figure.subplots(len(models), len(slopes), sharex=True, sharey=True, squeeze=False)
    for (row, model), (column, slope) in itertools.product(enumerate(models), enumerate(slopes)):
        axes = grid[row, column]
        rows = numbers[(numbers["model"] == model) & (numbers["slope"] == slope)]
        for schedule in schedules:
            own = rows[rows["schedule"] == schedule]
            axes.plot(own["workers"], own["efficiency"], **_line(DENSE, schedule))
        axes.set_title(f"{plain(human(model))}, slope {slope}")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.05)
        powers_of_four(axes.xaxis)
        show_percent(axes)
        grid[row, 0].set_ylabel("efficiency (%)")
        grid[-1, column].set_xlabel("workers")
    head(figure, title, [Line2D([], [], label=schedule_name(name), **_line(DENSE, name)) for name in schedules])
    return figure


def figure_width(models: Sequence[str]) -> float:
    """Return the inches of a figure with a column of panels per model."""
    return PAGE_INCHES if len(models) > 1 else 1.2 * COLUMN_INCHES


def powers_of_four(axis: Axis) -> None:
    """Mark an axis of numbers of workers at 1, 4, 16 and so on."""
    axis.set_major_locator(LogLocator(base=4, numticks=12))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _line(method: str, schedule: str) -> LineSettings:
    if method != DENSE:
        return look(method).line
    if schedule in SCHEDULE_LINES:
        return SCHEDULE_LINES[schedule]
    code = sum(schedule.encode())
    return {
        "color": PALETTE[code % len(PALETTE)],
        "linestyle": DASHES[code % len(DASHES)],
        "marker": MARKERS[code % len(MARKERS)],
    }
