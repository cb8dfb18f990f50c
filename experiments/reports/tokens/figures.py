"""Figures of studies of language models: loss over tokens, bytes and seconds; bits per byte by density and workers."""

import itertools
import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import head, new_figure, plain_log
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
from experiments.reports.tokens.curves import KEYS, drawn

PANELS = {
    "tokens": "tokens of all workers",
    "bytes": "sent by a worker",
    "at_100mbit_ms": "seconds at 100 Mbit/s, simulated",
    "at_1gbit_ms": "seconds at 1 Gbit/s, simulated",
}
NUM_PANELS = 3  # side by side
BITS = "bits per byte of the test set"


@style()
def draw_losses(numbers: pd.DataFrame, rows: pd.DataFrame, title: str) -> Figure:
    """Loss on the test set over tokens, bytes and seconds on links, a line per form with a mark at its end.

    Args:
        numbers: of ``curves``.
        rows: of ``rows``; those are drawn that ``drawn`` chooses.
    """
    chosen = drawn(rows, numbers)
    lines = _lines(chosen)
    figure = new_figure(PAGE_INCHES, 5.0)
    grid = figure.subplots(2, 2, sharey=True)
    handles = []
    for (_, row), line in zip(chosen.iterrows(), lines, strict=True):
        own = numbers[(numbers[KEYS] == row[KEYS]).all(axis=1)]
        handles.append(Line2D([], [], label=f"{row['name']} (n={own['num_seeds'].iloc[0]})", **line))
        for axes, column in zip(grid.flat, PANELS, strict=True):
            axes.plot(own[column], own["test_loss"], **line, markevery=[-1])
    for axes, (column, name) in zip(grid.flat, PANELS.items(), strict=True):
        axes.set_xlabel(name)
        _show_amounts(axes, column)
    for left, _ in grid:
        left.set_ylabel("loss on the test set")
    more = f"; dense, MiCRO's best and the best others of {len(rows)} forms" if len(chosen) < len(rows) else ""
    head(figure, title + more, handles)
    return figure


def _lines(chosen: pd.DataFrame) -> list[LineSettings]:
    """Return a line per row: a colour for each method and outer optimizer, dashes for what is exchanged."""
    kinds = list(dict.fromkeys(chosen.sort_values("interval", kind="stable")["exchanged"].map(_kind)))
    forms = [(str(row["method"]), str(row["outer"])) for _, row in chosen.iterrows()]
    lines = lines_of(sorted(forms, key=lambda form: form[1] != ""))  # the plain form of dense is black
    dashes = (DASHES[kinds.index(_kind(exchanged)) % len(DASHES)] for exchanged in chosen["exchanged"])
    return [lines[form] | {"linestyle": own, "linewidth": 1.0} for form, own in zip(forms, dashes, strict=True)]


@style()
def draw_by_density(rows: pd.DataFrame, title: str) -> Figure:
    """Bits per byte by the density asked for and by bytes; a line per method and what is reduced. Takes ``rows``."""
    figure = new_figure(PAGE_INCHES, 3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    sparse, handles = rows[rows["method"] != "dense"], []
    lines = lines_of(in_order(sparse["method"]))
    for (method, exchanged), own in sparse.groupby(["method", "exchanged"]):
        line = lines[str(method)] | {"linestyle": "-" if exchanged == "gradients" else DASHED}
        handles.append(Line2D([], [], label=f"{label(str(method))}, {exchanged}", **line))
        _draw_spread(left, own.sort_values("density"), "density", line)
        _draw_spread(right, own.sort_values("batch_bytes"), "batch_bytes", line)
    for _, row in rows[rows["method"] == "dense"].iterrows():
        line = {"color": BLACK, "linewidth": 0.8, "linestyle": "-" if row["exchanged"] == "gradients" else DASHED}
        handles.append(Line2D([], [], label=row["name"], **line))
        for axes in (left, right):
            axes.axhline(row["bits_per_byte"], **line)
    left.set(xlabel="density asked for", ylabel=BITS)
    right.set(xlabel="sent per step and worker")
    plain_log(left.xaxis)
    _log_bytes(right)
    head(figure, f"{title}: mean and range over seeds", handles)
    return figure


@style()
def draw_by_workers(rows: pd.DataFrame, title: str) -> Figure:
    """Bits per byte, density after the exchange and bytes by the number of workers; a line per method."""
    figure = new_figure(PAGE_INCHES, 2.9)
    panels = figure.subplots(1, 3)
    handles = []
    lines = lines_of(in_order(rows["method"]))
    for method, own in rows.groupby("method", sort=False):
        line = lines[str(method)]
        handles.append(Line2D([], [], label=label(str(method)), **line))
        own = own.sort_values("world_size")
        _draw_spread(panels[0], own, "world_size", line)
        panels[1].plot(own["world_size"], own["measured_density"], **line)
        panels[2].plot(own["world_size"], own["batch_bytes"], **line)
    counts = sorted(rows["world_size"].unique())
    for axes, name in zip(panels, (BITS, "density after an exchange", "sent per step and worker"), strict=True):
        axes.set(xlabel="workers", ylabel=name)
        plain_log(axes.xaxis)
        axes.set_xticks(counts, [f"{count}" for count in counts])
        axes.minorticks_off()
    plain_log(panels[1].yaxis)
    plain_log(panels[2].yaxis)
    panels[2].yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    head(figure, f"{title}: mean and range over seeds", handles)
    return figure


@style()
def draw_by_rate(rows: pd.DataFrame, title: str) -> Figure:
    """Bits per byte by the learning rate; a panel for each thing that is exchanged, a line for each form of it."""
    kinds = list(dict.fromkeys(rows.sort_values("interval", kind="stable")["exchanged"].map(_kind)))
    figure = new_figure(PAGE_INCHES, 2.1 * math.ceil(len(kinds) / NUM_PANELS) + 0.8)
    grid = figure.subplots(math.ceil(len(kinds) / NUM_PANELS), NUM_PANELS, sharex=True, sharey=True, squeeze=False)
    rates = sorted(rows["rate"].unique())
    handles: dict[str, Line2D] = {}
    for kind, axes in itertools.zip_longest(kinds, grid.flat):
        if kind is None:
            axes.set_axis_off()
            continue
        for _, own in rows[rows["exchanged"].map(_kind) == kind].groupby(["method", "outer", "density"], sort=False):
            name, line = _line_of(rows, own.iloc[0])
            _draw_spread(axes, own.sort_values("rate"), "rate", line)
            handles[name] = Line2D([], [], label=name, **line)
        axes.set_title(kind)
        plain_log(axes.xaxis)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.tick_params(labelbottom=True)
    figure.supxlabel("learning rate of the inner optimizer", fontsize="medium")
    figure.supylabel(BITS, fontsize="medium")
    head(figure, title, list(handles.values()))
    return figure


def _line_of(rows: pd.DataFrame, own: pd.Series) -> tuple[str, LineSettings]:
    """Return name and line of a form: its method's, dashed for an outer optimizer, thin for a further density."""
    method, outer = str(own["method"]), str(own["outer"])
    densities = list(dict.fromkeys(rows.loc[rows["method"] == method, "density"]))  # the best form's comes first
    density = f"at {own['density']:g}" if len(densities) > 1 else ""
    line = lines_of(in_order(rows["method"]))[method] | ({"linestyle": DASHED} if outer else {})
    if place := densities.index(own["density"]):
        line |= {"linestyle": DASHES[-place], "linewidth": 0.8, "markersize": 3.0}
    return ", ".join(word for word in (label(method), outer, density) if word), line


def _kind(exchanged: str) -> str:
    """Return what is exchanged, without the outer optimizer."""
    return exchanged.split(", ")[0]


@style()
def draw_by_passes(rows: pd.DataFrame, title: str) -> Figure:
    """Bits per byte of each form, a row per form and a mark with its range per length of the training and workers."""
    shortest = rows.sort_values(["passes", "bits_per_byte"]).drop_duplicates("name")
    places = {name: place for place, name in enumerate(reversed(list(shortest["name"])))}
    figure = new_figure(PAGE_INCHES, 0.28 * len(places) + 1.0)
    axes = figure.subplots()
    handles = []
    for ((passes, workers), own), color in zip(rows.groupby(["passes", "world_size"]), PALETTE, strict=False):
        heights = own["name"].map(places)
        axes.hlines(heights, own["bits_per_byte_low"], own["bits_per_byte_high"], color=color, linewidth=1.2)
        mark: LineSettings = {"color": color, "marker": "o", "linestyle": "none"}
        axes.plot(own["bits_per_byte"], heights, **mark)
        named = f"{passes} {'pass' if passes == 1 else 'passes'}, {workers} workers (n={own['num_seeds'].max()})"
        handles.append(Line2D([], [], label=named, **mark))
    axes.set_yticks(list(places.values()), [plain(name) for name in places])
    axes.set_xlabel(BITS)
    head(figure, f"{title}: mean and range over seeds", handles)
    return figure


def _show_amounts(axes: Axes, column: str) -> None:
    """Write an axis of tokens, bytes or seconds for people; all but tokens differ by orders of magnitude."""
    if column == "tokens":
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
        return
    plain_log(axes.xaxis)
    if column == "bytes":
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))


def _draw_spread(axes: Axes, rows: pd.DataFrame, column: str, line: LineSettings) -> None:
    axes.plot(rows[column], rows["bits_per_byte"], **line)
    low, high = rows["bits_per_byte_low"], rows["bits_per_byte_high"]
    axes.vlines(rows[column], low, high, color=line["color"], linewidth=0.8)


def _log_bytes(axes: Axes) -> None:
    plain_log(axes.xaxis)
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
