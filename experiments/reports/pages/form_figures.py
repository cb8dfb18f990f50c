"""Figures of what the forms of a language model reach, by density, workers, rate and length."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import head, new_figure, plain_log
from experiments.reports.measures import metric_of
from experiments.reports.names import in_order, label
from experiments.reports.plot_style import (
    BLACK,
    DASHED,
    DASHES,
    PAGE_INCHES,
    PALETTE,
    LineSettings,
    lines_of,
    plain,
    style,
)

NUM_PANELS = 3  # side by side
SPREAD = "mean and range over seeds"


@style()
def draw_by_density(rows: pd.DataFrame, title: str) -> Figure:
    """The measure by the density asked for and by bytes; a line per method and what is exchanged."""
    figure = new_figure(PAGE_INCHES, 3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    sparse, handles = rows[rows["sparsifier"] != "dense"], []
    lines = lines_of(in_order(sparse["sparsifier"]))
    for (method, form), own in sparse.groupby(["sparsifier", "form"]):
        line = lines[str(method)] | {"linestyle": "-" if form == "gradients" else DASHED}
        handles.append(Line2D([], [], label=f"{label(str(method))}, {form}", **line))
        _draw_spread(left, own.sort_values("density"), "density", line)
        _draw_spread(right, own.sort_values("batch_bytes"), "batch_bytes", line)
    for _, row in rows[rows["sparsifier"] == "dense"].iterrows():
        line = {"color": BLACK, "linewidth": 0.8, "linestyle": "-" if row["form"] == "gradients" else DASHED}
        handles.append(Line2D([], [], label=f"{label('dense')}, {row['form']}", **line))
        for axes in (left, right):
            axes.axhline(row["value"], **line)
    left.set(xlabel="density asked for", ylabel=metric_of(rows["metric"]).label)
    right.set(xlabel="sent per step and worker")
    plain_log(left.xaxis)
    plain_log(right.xaxis)
    right.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    head(figure, f"{title}: {SPREAD}", handles)
    return figure


@style()
def draw_by_workers(rows: pd.DataFrame, title: str) -> Figure:
    """The measure, density after the exchange and bytes by the number of workers; a line per method."""
    figure = new_figure(PAGE_INCHES, 2.9)
    panels = figure.subplots(1, 3)
    handles, lines = [], lines_of(in_order(rows["sparsifier"]))
    for method, own in rows.groupby("sparsifier", sort=False):
        line = lines[str(method)]
        handles.append(Line2D([], [], label=label(str(method)), **line))
        own = own.sort_values("world_size")
        _draw_spread(panels[0], own, "world_size", line)
        panels[1].plot(own["world_size"], own["measured_density"], **line)
        panels[2].plot(own["world_size"], own["batch_bytes"], **line)
    counts = sorted(rows["world_size"].unique())
    names = (metric_of(rows["metric"]).label, "density after an exchange", "sent per step and worker")
    for axes, name in zip(panels, names, strict=True):
        axes.set(xlabel="workers", ylabel=name)
        plain_log(axes.xaxis)
        axes.set_xticks(counts, [f"{count}" for count in counts])
        axes.minorticks_off()
    plain_log(panels[1].yaxis)
    plain_log(panels[2].yaxis)
    panels[2].yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    head(figure, f"{title}: {SPREAD}", handles)
    return figure


@style()
def draw_by_rate(rows: pd.DataFrame, title: str) -> Figure:
    """The measure by the learning rate; a panel for each thing that is exchanged, a line for each form of it."""
    exchanged = rows["form"].str.partition(", ")[0]
    kinds = sorted(set(exchanged))
    figure = new_figure(PAGE_INCHES, 2.1 * math.ceil(len(kinds) / NUM_PANELS) + 0.8)
    grid = figure.subplots(math.ceil(len(kinds) / NUM_PANELS), NUM_PANELS, sharex=True, sharey=True, squeeze=False)
    rates = sorted(rows["rate"].unique())
    handles: dict[str, Line2D] = {}
    for kind, axes in zip(kinds, grid.flat, strict=False):
        for _, own in rows[exchanged == kind].groupby(["sparsifier", "form", "density"], sort=False):
            name, line = _line_of(rows, own.iloc[0])
            _draw_spread(axes, own.sort_values("rate"), "rate", line)
            handles[name] = Line2D([], [], label=name, **line)
        axes.set_title(kind)
        plain_log(axes.xaxis)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(kinds) :]:
        axes.set_axis_off()
    figure.supxlabel("learning rate of the inner optimizer", fontsize="medium")
    figure.supylabel(metric_of(rows["metric"]).label, fontsize="medium")
    head(figure, title, list(handles.values()))
    return figure


@style()
def draw_by_epochs(rows: pd.DataFrame, title: str) -> Figure:
    """The measure of each form, a row per form and a mark with its range per length of the training and workers."""
    named = rows.assign(name=[f"{label(row['sparsifier'])}, {row['form']}" for _, row in rows.iterrows()])
    shortest = named.sort_values(["epochs", "value"]).drop_duplicates("name")
    places = {name: place for place, name in enumerate(reversed(list(shortest["name"])))}
    figure = new_figure(PAGE_INCHES, 0.28 * len(places) + 1.0)
    axes = figure.subplots()
    handles = []
    for ((epochs, workers), own), color in zip(named.groupby(["epochs", "world_size"]), PALETTE, strict=False):
        heights = own["name"].map(places)
        axes.hlines(heights, own["low"], own["high"], color=color, linewidth=1.2)
        mark: LineSettings = {"color": color, "marker": "o", "linestyle": "none"}
        axes.plot(own["value"], heights, **mark)
        length = "1 pass" if epochs == 1 else f"{epochs} passes"
        handles.append(Line2D([], [], label=f"{length}, {workers} workers (n={own['num_seeds'].max():g})", **mark))
    axes.set_yticks(list(places.values()), [plain(name) for name in places])
    axes.set_xlabel(metric_of(rows["metric"]).label)
    head(figure, f"{title}: {SPREAD}", handles)
    return figure


def _line_of(rows: pd.DataFrame, own: pd.Series) -> tuple[str, LineSettings]:
    """Return name and line of a form: its method's, dashed for an outer optimizer, thin for a further density."""
    method, outer = str(own["sparsifier"]), str(own["form"]).partition(", ")[2]
    densities = list(dict.fromkeys(rows.loc[rows["sparsifier"] == method, "density"]))  # the best form's comes first
    density = f"at {own['density']:g}" if len(densities) > 1 else ""
    line = lines_of(in_order(rows["sparsifier"]))[method] | ({"linestyle": DASHED} if outer else {})
    if place := densities.index(own["density"]):
        line |= {"linestyle": DASHES[-place], "linewidth": 0.8, "markersize": 3.0}
    return ", ".join(word for word in (label(method), outer, density) if word), line


def _draw_spread(axes: Axes, rows: pd.DataFrame, column: str, line: LineSettings) -> None:
    axes.plot(rows[column], rows["value"], **line)
    axes.vlines(rows[column], rows["low"], rows["high"], color=line["color"], linewidth=0.8)
