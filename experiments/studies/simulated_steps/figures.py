"""Figures of simulated steps: over workers, a panel per model; timelines of backward and exchange; published gains."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from experiments.config.units import human_bytes, three_digits
from experiments.reports.figure_parts import handles_of, head, new_figure, plain_log, show_percent
from experiments.reports.names import human, in_legend, in_order
from experiments.reports.plot_style import (
    BLACK,
    BLUE,
    COLUMN_INCHES,
    DASHDOT,
    DASHED,
    DOTTED,
    GREY,
    GREY_LINE,
    ORANGE,
    PAGE_INCHES,
    SKY,
    TARGET_LINE,
    VERMILLION,
    LineSettings,
    lines_of,
    plain,
    style,
)
from experiments.studies.simulated_steps.method_choices import DENSE
from experiments.studies.simulated_steps.tables import SCHEDULES, rate_name, way_name

Lines = Mapping[tuple[Hashable, ...], LineSettings]
READINGS: dict[tuple[Hashable, ...], LineSettings] = {
    ("layer", 16): {"color": BLUE, "linestyle": "-"},
    ("layer", 8): {"color": BLUE, "linestyle": DASHED},
    ("tensor", 16): {"color": VERMILLION, "linestyle": DASHDOT},
    ("tensor", 8): {"color": VERMILLION, "linestyle": DOTTED},
}
KINDS_OF_LEVELS: dict[str, LineSettings] = {
    "two": {"linestyle": "-"},
    "one": {"linestyle": "--", "markerfacecolor": "white"},
}
PUBLISHED_LINE: LineSettings = {"color": BLACK, "linestyle": "-", "linewidth": 0.8}


@style()
def draw_speedups(numbers: pd.DataFrame, title: str) -> Figure:
    """Speed-up and efficiency over workers; columns model, workers, method, schedule, speedup, efficiency."""
    lines: Lines = lines_of(zip(numbers["method"], numbers["schedule"], strict=True))
    figure, grid = _over_workers(numbers, ["model"], ["method", "schedule"], lines, ["speedup", "efficiency"])
    ends = [numbers["workers"].min(), numbers["workers"].max()]
    for axes in grid[0]:
        axes.plot(ends, ends, **TARGET_LINE)
    names = {in_legend_of(*way): line for way, line in lines.items()}
    head(figure, title, [Line2D([], [], label="linear", **TARGET_LINE), *handles_of(names)])
    return figure


@style()
def draw_trees(numbers: pd.DataFrame, title: str) -> Figure:
    """Efficiency with double trees under two slopes; columns model, slope, workers, schedule, efficiency."""
    of_dense = lines_of((DENSE, each) for each in numbers["schedule"])
    lines: Lines = {key[1:]: line for key, line in of_dense.items()}
    figure, _ = _over_workers(numbers, ["model", "slope"], ["schedule"], lines, ["efficiency"])
    head(figure, title, handles_of({in_legend_of(*way): line for way, line in of_dense.items()}))
    return figure


@style()
def draw_borders(numbers: pd.DataFrame, title: str, rates: tuple[float, float]) -> Figure:
    """Up to which rate of a link each method is faster than dense; columns model, method, workers, border.

    A border beyond the highest rate is drawn there; where a method never is faster, there is no mark.
    """
    of_methods = lines_of(in_order(numbers["method"]))
    lines: Lines = {(name,): line for name, line in of_methods.items()}
    seen = numbers.assign(border=numbers["border"].clip(upper=rates[1]).where(numbers["border"] > 0))
    figure, grid = _over_workers(seen, ["model"], ["method"], lines, ["border"])
    grid[0][0].set_ylim(rates[0], 1.3 * rates[1])
    head(figure, title, handles_of({in_legend(name): line for name, line in of_methods.items()}))
    return figure


@style()
def draw_levels(numbers: pd.DataFrame, title: str) -> Figure:
    """Efficiency and bytes between nodes: two levels are whole lines, one level dashed ones with hollow marks.

    Columns model, algorithm, workers, method, levels, efficiency, between_bytes.
    """
    of_methods = lines_of(in_order(numbers["method"]))
    lines: Lines = {
        (method, levels): line if line is GREY_LINE else line | kind
        for method, line in of_methods.items()
        for levels, kind in KINDS_OF_LEVELS.items()
    }
    seen = numbers.assign(between_bytes=numbers["between_bytes"].where(numbers["between_bytes"] > 0))
    measures = ["efficiency", "between_bytes"]
    figure, _ = _over_workers(seen, ["model", "algorithm"], ["method", "levels"], lines, measures)
    handles = handles_of({in_legend(name): line | {"linestyle": "-"} for name, line in of_methods.items()})
    names = {"two": "two levels", "one": "one level"}
    kinds = [Line2D([], [], label=names[key], color=GREY, marker="o", **kind) for key, kind in KINDS_OF_LEVELS.items()]
    head(figure, title, handles + kinds)
    return figure


def _over_workers(
    numbers: pd.DataFrame, panel: Sequence[str], line: Sequence[str], lines: Lines, measures: Sequence[str]
) -> tuple[Figure, np.ndarray]:
    """Return a figure with a row of panels for each measure, over workers, and its panels.

    Args:
        panel, line: columns whose values tell the panels of a row, and the lines of a panel, apart.
        measures: keys of MEASURES.
    """
    panels = list(numbers.groupby(list(panel), sort=False))
    columns = numbers[panel[-1]].nunique()
    num_rows = len(measures) * -(-len(panels) // columns)
    figure = new_figure(PAGE_INCHES if columns > 1 else 1.2 * COLUMN_INCHES, 1.0 + 2.0 * num_rows)
    grid = figure.subplots(num_rows, columns, sharex=True, sharey="row", squeeze=False)
    for place, (key, rows) in enumerate(panels):
        row, column = place // columns * len(measures), place % columns
        for measure, axes in zip(measures, grid[row:, column], strict=False):
            for own, some in rows.groupby(list(line), sort=False):
                axes.plot(some["workers"], some[measure], **lines[own])
            label, show = MEASURES[measure]
            show(axes)
            axes.set_ylabel("" if column else label)
        grid[row, column].set_title(", ".join(plain(human(str(word))) for word in key))
    for axes in grid[-1]:
        axes.set_xlabel("workers")
    _powers(grid[0, 0].xaxis)
    return figure, grid


def _powers(axis: XAxis | YAxis) -> None:
    """Mark an axis at 1, 4, 16 and so on."""
    (axis.axes.set_yscale if axis.axis_name == "y" else axis.axes.set_xscale)("log", base=2)
    axis.set_major_locator(LogLocator(base=4, numticks=12))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _show_efficiency(axes: Axes) -> None:
    axes.axhline(1, **TARGET_LINE)
    axes.set_ylim(0, 1.05)
    show_percent(axes)


def _show_amounts(write: Callable[[float], str]) -> Callable[[Axes], None]:
    def show(axes: Axes) -> None:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_major_formatter(lambda value, _: write(value))
        axes.yaxis.set_minor_formatter(NullFormatter())

    return show


MEASURES: dict[str, tuple[str, Callable[[Axes], None]]] = {  # name of the axis, and how its numbers are shown
    "speedup": ("speed-up over one worker", lambda axes: _powers(axes.yaxis)),
    "efficiency": ("efficiency (% of linear)", _show_efficiency),
    "between_bytes": ("to other nodes, a worker and step", _show_amounts(human_bytes)),
    "border": ("bandwidth of a link (bit/s)", _show_amounts(rate_name)),
}


@style()
def draw_timeline(numbers: pd.DataFrame) -> Figure:
    """When backward computes and when gradients travel, a pair of bars per schedule, of one model on one network.

    Columns model, network, algorithm, workers, schedule, what, begin_s, end_s.
    """
    first, schedules = numbers.iloc[0], list(dict.fromkeys(numbers["schedule"]))
    figure = new_figure(PAGE_INCHES, 0.9 + 0.5 * len(schedules))
    axes = figure.subplots()
    for place, schedule in enumerate(schedules):
        rows = numbers[numbers["schedule"] == schedule]
        for what, height, color in (("backward", place - 0.2, SKY), ("exchange", place + 0.2, ORANGE)):
            bars = rows[rows["what"] == what]
            spans = list(zip(1e3 * bars["begin_s"], 1e3 * (bars["end_s"] - bars["begin_s"]), strict=True))
            axes.broken_barh(spans, (height - 0.17, 0.34), facecolor=color, edgecolor="white", linewidth=0.3)
        end_ms = 1e3 * rows["end_s"].max()
        axes.annotate(
            f"{three_digits(end_ms)} ms", (end_ms, place + 0.2), (3, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(schedules)), [in_legend_of(DENSE, schedule) for schedule in schedules])
    axes.set_ylim(len(schedules) - 0.5, -0.5)
    axes.set_xlim(0, 1.1e3 * numbers["end_s"].max())
    axes.set_xlabel("ms since the start of backward")
    axes.grid(visible=False, axis="y")
    title = f"{human(first['model'])} on {first['network']}, {first['algorithm']}, {first['workers']} workers, dense"
    names = {"backward": SKY, "all-reduce of a group": ORANGE}
    head(figure, title, [Patch(label=name, facecolor=color) for name, color in names.items()])
    return figure


@style()
def draw_headline(numbers: pd.DataFrame, title: str) -> Figure:
    """Gains of merged gradients over the assumed computation, a column of panels per model.

    Columns model, grain, fitted_at, compute_s, over_layerwise, over_single, published_layerwise, published_single.
    """
    models, others = list(dict.fromkeys(numbers["model"])), ("layerwise", "single")
    figure = new_figure(PAGE_INCHES if len(models) > 1 else 1.2 * COLUMN_INCHES, 4.4)
    grid = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for column, (model, rows) in enumerate(numbers.groupby("model", sort=False)):
        for axes, other in zip(grid[:, column], others, strict=True):
            published = float(rows[f"published_{other}"].iloc[0])
            axes.axhline(published, **PUBLISHED_LINE)
            place, of = (1, published), axes.get_yaxis_transform()
            axes.annotate(f"published {published:g}", place, (0, 2), of, "offset points", ha="right")
            for reading, own in rows.groupby(["grain", "fitted_at"], sort=False):
                axes.plot(own["compute_s"], own[f"over_{other}"], **READINGS[reading])
            axes.set_ylim(0.95, 1 + 2 * (numbers[f"published_{other}"].max() - 1))
            plain_log(axes.xaxis)
        grid[0, column].set_title(plain(human(str(model))))
        grid[1, column].set_xlabel("assumed forward + backward of a worker (s)")
    for axes, other in zip(grid[:, 0], others, strict=True):
        axes.set_ylabel(f"{SCHEDULES[other]} / MG-WFBP")
    handles = [
        Line2D([], [], label=f"sent by {grain}, fit of {fitted_at} ranks", **line)
        for (grain, fitted_at), line in READINGS.items()
    ]
    head(figure, title, [*handles, Line2D([], [], label="published", **PUBLISHED_LINE)])
    return figure


def in_legend_of(method: object, schedule: object) -> str:
    """Return the name of a method under a schedule where no heading says what is what: ``dense, exact schedule``."""
    name = way_name(str(method), str(schedule), in_legend)
    return f"{'dense, ' if method == DENSE else ''}{name}{' schedule' if schedule == 'exact' else ''}"
