"""Figures of speed-ups over workers: of schedules and methods, and of double trees under two slopes."""

import itertools
from collections.abc import Sequence

import pandas as pd
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from experiments.reports.figure_parts import handles_of, head, new_figure, show_percent
from experiments.reports.names import human
from experiments.reports.plot_style import (
    COLUMN_INCHES,
    PAGE_INCHES,
    TARGET_LINE,
    lines_of,
    plain,
    style,
)
from experiments.studies.simulated_steps.labels import in_legend
from experiments.studies.simulated_steps.step import DENSE


@style()
def draw_speedups(numbers: pd.DataFrame, title: str) -> Figure:
    """Speed-up and efficiency over workers, a column of panels per model.

    Columns model, workers, method, schedule, speedup, efficiency.
    """
    ways = list(dict.fromkeys(zip(numbers["method"], numbers["schedule"], strict=True)))
    lines, models = lines_of(ways), list(dict.fromkeys(numbers["model"]))
    figure = new_figure(figure_width(models), 5.2)
    grid = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for (upper, lower), model in zip(grid.T, models, strict=True):
        rows = numbers[numbers["model"] == model]
        ends = [rows["workers"].min(), rows["workers"].max()]
        upper.plot(ends, ends, **TARGET_LINE)
        lower.axhline(1, **TARGET_LINE)
        for method, schedule in ways:
            own = rows[(rows["method"] == method) & (rows["schedule"] == schedule)]
            upper.plot(own["workers"], own["speedup"], **lines[method, schedule])
            lower.plot(own["workers"], own["efficiency"], **lines[method, schedule])
        upper.set_title(plain(human(model)))
        upper.set_xscale("log", base=2)
        upper.set_yscale("log", base=2)
        powers_of_four(upper.xaxis)
        powers_of_four(upper.yaxis)
        lower.set(xlabel="workers", ylim=(0, 1.05))
        show_percent(lower)
    grid[0, 0].set_ylabel("speed-up over one worker")
    grid[1, 0].set_ylabel("efficiency (% of linear)")
    handles = [Line2D([], [], label="linear", **TARGET_LINE)]
    head(figure, title, [*handles, *handles_of({in_legend(*way): line for way, line in lines.items()})])
    return figure


@style()
def draw_trees(numbers: pd.DataFrame, title: str) -> Figure:
    """Efficiency with double trees under two slopes, a row of panels per model.

    Columns model, slope, workers, schedule, efficiency.
    """
    models, slopes = list(dict.fromkeys(numbers["model"])), list(dict.fromkeys(numbers["slope"]))
    schedules = list(dict.fromkeys(numbers["schedule"]))
    lines = lines_of((DENSE, schedule) for schedule in schedules)
    figure = new_figure(PAGE_INCHES, 0.9 + 1.7 * len(models))
    grid = figure.subplots(len(models), len(slopes), sharex=True, sharey=True, squeeze=False)
    for (row, model), (column, slope) in itertools.product(enumerate(models), enumerate(slopes)):
        axes = grid[row, column]
        rows = numbers[(numbers["model"] == model) & (numbers["slope"] == slope)]
        for schedule in schedules:
            own = rows[rows["schedule"] == schedule]
            axes.plot(own["workers"], own["efficiency"], **lines[DENSE, schedule])
        axes.set_title(f"{plain(human(model))}, slope {slope}")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.05)
        powers_of_four(axes.xaxis)
        show_percent(axes)
        grid[row, 0].set_ylabel("efficiency (%)")
        grid[-1, column].set_xlabel("workers")
    head(figure, title, handles_of({in_legend(*way): line for way, line in lines.items()}))
    return figure


def figure_width(models: Sequence[str]) -> float:
    """Return the inches of a figure with a column of panels per model."""
    return PAGE_INCHES if len(models) > 1 else 1.2 * COLUMN_INCHES


def powers_of_four(axis: Axis) -> None:
    """Mark an axis of numbers of workers at 1, 4, 16 and so on."""
    axis.set_major_locator(LogLocator(base=4, numticks=12))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())
