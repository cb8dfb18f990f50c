"""Figures of simulated steps: a panel per model, a line per schedule or method."""

import itertools
import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from experiments.reports.figures import LineSettings
from experiments.reports.names import human, in_order
from experiments.reports.plot_style import (
    BLACK,
    BLUE,
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
    VERMILLION,
    head,
    look,
    new_figure,
    show_percent,
    style,
)

LINEAR: LineSettings = {"color": GREY, "linestyle": "-", "linewidth": 0.6}
SAID: LineSettings = {"color": BLACK, "linestyle": "-", "linewidth": 0.8}
# What a schedule is called in figures, and how it is drawn.
SCHEDULE_LINES: dict[str, tuple[str, LineSettings]] = {
    "layerwise": ("WFBP", {"color": GREY, "linestyle": DASHED, "marker": "s"}),
    "single": ("SyncEASGD", {"color": PURPLE, "linestyle": DOTTED, "marker": "^"}),
    "mgwfbp": ("MG-WFBP", {"color": SKY, "linestyle": DASHDOT, "marker": "v"}),
    "exact": ("exact", {"color": BLACK, "linestyle": "-", "marker": "o"}),
    "ddp": ("DDP", {"color": ORANGE, "linestyle": LONG, "marker": "P"}),
    "asc": ("ASC-WFBP", {"color": GREEN, "linestyle": DASHDOT, "marker": "X"}),
    "dear": ("DeAR", {"color": GREEN, "linestyle": LONG, "marker": "*"}),
}
READINGS: dict[tuple[str, int], LineSettings] = {
    ("layer", 16): {"color": BLUE, "linestyle": "-"},
    ("layer", 8): {"color": BLUE, "linestyle": DASHED},
    ("tensor", 16): {"color": VERMILLION, "linestyle": DASHDOT},
    ("tensor", 8): {"color": VERMILLION, "linestyle": DOTTED},
}


def schedule_name(schedule: str) -> str:
    """Name of a schedule in legends and tables."""
    return SCHEDULE_LINES[schedule][0] if schedule in SCHEDULE_LINES else schedule


def way_name(method: str, schedule: str) -> str:
    """Name of a method under a schedule."""
    if method == "dense":
        return schedule_name(schedule)
    return f"{look(method).name}, {'one bucket' if schedule == 'single' else schedule_name(schedule)}"


def rate_name(value: float) -> str:
    """Write bits per second: ``100M``, ``10G``; never and always, where there is no border."""
    if value in (0, math.inf):
        return "always" if value else "never"
    power = math.floor(math.log10(value) / 3 + 1e-9)
    return f"{value / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"


@style()
def draw_speedups(numbers: pd.DataFrame, title: str) -> Figure:
    """Speed-up and efficiency over workers, a column of panels per model.

    Columns model, workers, method, schedule, speedup, efficiency.
    """
    ways = list(dict.fromkeys(zip(numbers["method"], numbers["schedule"], strict=True)))
    models = list(dict.fromkeys(numbers["model"]))
    figure = new_figure(_width(models), 5.2)
    grid = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for (upper, lower), model in zip(grid.T, models, strict=True):
        rows = numbers[numbers["model"] == model]
        _linear(upper, rows["workers"])
        lower.axhline(1, **LINEAR)
        for method, schedule in ways:
            own = rows[(rows["method"] == method) & (rows["schedule"] == schedule)]
            upper.plot(own["workers"], own["speedup"], **_line(method, schedule))
            lower.plot(own["workers"], own["efficiency"], **_line(method, schedule))
        upper.set_title(human(model))
        upper.set_xscale("log", base=2)
        upper.set_yscale("log", base=2)
        _powers_of_four(upper.xaxis)
        _powers_of_four(upper.yaxis)
        lower.set(xlabel="workers", ylim=(0, 1.05))
        show_percent(lower)
    grid[0, 0].set_ylabel("speed-up over one worker")
    grid[1, 0].set_ylabel("efficiency (% of linear)")
    handles = [Line2D([], [], label="linear", **LINEAR)]
    head(figure, title, [*handles, *(Line2D([], [], label=way_name(*way), **_line(*way)) for way in ways)])
    return figure


@style()
def draw_borders(numbers: pd.DataFrame, title: str, rates: tuple[float, float]) -> Figure:
    """Up to which rate each method is faster than dense, over workers; columns model, method, workers, border.

    A border beyond the rates looked at is drawn at their end.
    """
    models, methods = list(dict.fromkeys(numbers["model"])), in_order(numbers["method"])
    low, high = rates
    figure = new_figure(_width(models), 3.2)
    grid = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(grid, models, strict=True):
        for method in methods:
            rows = numbers[(numbers["model"] == model) & (numbers["method"] == method)]
            axes.plot(rows["border"].clip(low, high), rows["workers"], clip_on=False, **_method_line(method))
        axes.set_title(human(model))
        axes.set(xscale="log", xlim=rates, xlabel="bandwidth of a link (bit/s)")
        axes.xaxis.set_major_locator(LogLocator(numticks=8))
        axes.xaxis.set_major_formatter(lambda value, _: rate_name(value))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yscale("log", base=2)
        axes.set_yticks(sorted(numbers["workers"].unique()))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    grid[0].set_ylabel("workers")
    head(figure, title, [Line2D([], [], label=look(name).name, **_method_line(name)) for name in methods])
    figure.get_layout_engine().set(wspace=0.08)  # type: ignore[union-attr, call-arg]
    return figure


@style()
def draw_headline(numbers: pd.DataFrame, title: str) -> Figure:
    """Gains of merged gradients over the assumed computation, a column of panels per model.

    Columns model, grain, fitted_at, compute_s, over_layerwise, over_single, and the published ones said_layerwise and
    said_single.
    """
    models = list(dict.fromkeys(numbers["model"]))
    highest = {against: numbers[f"said_{against}"].max() for against in ("layerwise", "single")}
    figure = new_figure(_width(models), 4.4)
    grid = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for column, model in enumerate(models):
        rows = numbers[numbers["model"] == model]
        for axes, against in zip(grid[:, column], ("layerwise", "single"), strict=True):
            said = float(rows[f"said_{against}"].iloc[0])
            axes.axhline(said, **SAID)
            axes.annotate(
                f"published {said:g}", (1, said), (0, 2), axes.get_yaxis_transform(), "offset points", ha="right"
            )
            for (grain, fitted_at), own in rows.groupby(["grain", "fitted_at"], sort=False):
                axes.plot(own["compute_s"], own[f"over_{against}"], **READINGS[grain, fitted_at])
            axes.set(xscale="log", ylim=(0.95, 1 + 2 * (highest[against] - 1)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        grid[0, column].set_title(human(model))
        grid[1, column].set_xlabel("assumed forward + backward of a worker (s)")
    grid[0, 0].set_ylabel("WFBP / MG-WFBP")
    grid[1, 0].set_ylabel("SyncEASGD / MG-WFBP")
    handles = [
        Line2D([], [], label=f"sent by {grain}, fit of {fitted_at} ranks", **line)
        for (grain, fitted_at), line in READINGS.items()
    ]
    head(figure, title, [*handles, Line2D([], [], label="published", **SAID)])
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
            axes.plot(own["workers"], own["efficiency"], **_line("dense", schedule))
        axes.set_title(f"{human(model)}, slope {slope}")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.05)
        _powers_of_four(axes.xaxis)
        show_percent(axes)
        grid[row, 0].set_ylabel("efficiency (%)")
        grid[-1, column].set_xlabel("workers")
    head(figure, title, [Line2D([], [], label=schedule_name(name), **_line("dense", name)) for name in schedules])
    return figure


def _width(models: Sequence[str]) -> float:
    return PAGE_INCHES if len(models) > 1 else 1.2 * COLUMN_INCHES


def _linear(axes: Axes, workers: Sequence[int] | pd.Series) -> None:
    ends = [min(workers), max(workers)]
    axes.plot(ends, ends, **LINEAR)


def _powers_of_four(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(base=4, numticks=12))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _line(method: str, schedule: str) -> LineSettings:
    if method != "dense":
        return _method_line(method)
    if schedule in SCHEDULE_LINES:
        return SCHEDULE_LINES[schedule][1]
    code = sum(schedule.encode())
    return {
        "color": PALETTE[code % len(PALETTE)],
        "linestyle": DASHES[code % len(DASHES)],
        "marker": MARKERS[code % len(MARKERS)],
    }


def _method_line(method: str) -> LineSettings:
    own = look(method)
    return {"color": own.color, "linestyle": own.dashes, "marker": own.marker}
