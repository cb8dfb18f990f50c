"""The figures themselves: each takes a tidy frame of numbers and a title, and knows nothing of runs or files."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.reports.frames import STAGES
from experiments.reports.measures import Metric
from experiments.reports.names import in_order, label
from experiments.reports.plot_style import (
    BLACK,
    COLUMN_INCHES,
    DASHES,
    GREEN,
    MARKERS,
    PAGE_INCHES,
    PALETTE,
    SKY,
    VERMILLION,
    head,
    look,
    new_figure,
    plain_log,
    plain_ticks,
    show_metric,
    show_percent,
    style,
)
from experiments.reports.tables import human_bytes

LineSettings = dict[str, Any]
RULES = ("published", "repaired", "agreed")
STAGE_FILLS: dict[str, LineSettings] = {
    stage: {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
    for stage, color, hatch in zip(STAGES, (SKY, VERMILLION, GREEN, "#dddddd"), ("", "////", "....", ""), strict=True)
}
TARGET_LINE: LineSettings = {"color": BLACK, "linewidth": 0.8, "linestyle": (0, (1, 1.5))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One method in a figure: its name, how its line looks, its rows of the numbers."""

    name: str
    line: LineSettings
    rows: pd.DataFrame

    @property
    def color(self) -> str:
        """The method's colour."""
        return str(self.line["color"])

    def handle(self, num_seeds: int) -> Line2D:
        """Entry of the legend."""
        return Line2D([], [], label=f"{self.name} (n={num_seeds})", **self.line)


@style()
def draw_convergence(numbers: pd.DataFrame, metric: Metric, title: str) -> Figure:
    """A measure over steps, over time and over bytes sent; a band spans the seeds. Takes ``convergence_numbers``.

    Bytes are left out where there are none, as with one worker.
    """
    time_scale, time_unit = _time_unit(numbers["time_s"].max())
    byte_scale, byte_unit = _byte_unit(numbers["total_bytes"].max())
    panels = [("step", 1.0, "step"), ("time_s", time_scale, f"training time ({time_unit})")]
    if numbers["total_bytes"].max() > 0:
        panels.append(("total_bytes", byte_scale, f"sent per worker ({byte_unit})"))
    figure = new_figure(PAGE_INCHES, 2.7)
    grid = figure.subplots(1, len(panels), sharey=True)
    curves = _curves(numbers)
    for axes, (column, scale, name) in zip(grid, panels, strict=True):
        for place, curve in enumerate(curves):
            _draw_band(axes, curve, curve.rows[column] / scale, metric.key, place)
        axes.set_xlabel(name)
        if column == "total_bytes":  # methods are orders of magnitude apart
            plain_log(axes.xaxis)
    show_metric(grid[0].yaxis, metric)
    head(figure, title, [curve.handle(curve.rows["num_seeds"].max()) for curve in curves])
    return figure


@style()
def draw_density(numbers: pd.DataFrame, title: str) -> Figure:
    """Density and its error over steps: a thin line per seed, a strong one for the mean. Takes ``density_numbers``."""
    figure = new_figure(COLUMN_INCHES, 3.9)
    top, bottom = figure.subplots(2, 1, sharex=True)
    curves = _curves(numbers)
    for place, curve in enumerate(curves):
        _draw_seeds(top, curve, "density", place)
        _draw_seeds(bottom, curve, "density_error", place)
    target = numbers.groupby("step")["target_density"].first()
    top.plot(target.index, target, zorder=1.5, **TARGET_LINE)
    top.set(ylabel="density")
    plain_log(top.yaxis)
    bottom.set(ylabel="density error", xlabel="step")
    _log_with_zero(bottom, numbers["density_error"])
    handles = [curve.handle(curve.rows["seed"].nunique()) for curve in curves]
    head(figure, title, [*handles, Line2D([], [], label="target", **TARGET_LINE)])
    return figure


@style()
def draw_residuals(numbers: pd.DataFrame, title: str) -> Figure:
    """Norm of rank 0's residual over steps: a thin line per seed, a strong one for the mean.

    Takes ``residual_numbers``.
    """
    figure = new_figure(COLUMN_INCHES, 2.6)
    axes = figure.subplots()
    curves = _curves(numbers)
    for place, curve in enumerate(curves):
        _draw_seeds(axes, curve, "residual_norm", place)
    axes.set(ylabel="norm of the residual", xlabel="step")
    plain_log(axes.yaxis)
    head(figure, title, [curve.handle(curve.rows["seed"].nunique()) for curve in curves])
    return figure


@style()
def draw_throughput(numbers: pd.DataFrame, title: str) -> Figure:
    """Samples per second and scaling efficiency over the number of workers. Takes ``throughput_numbers``."""
    figure = new_figure(PAGE_INCHES, 2.7)
    left, right = figure.subplots(1, 2)
    curves = _curves(numbers)
    sizes = sorted(numbers["world_size"].unique())
    for curve in curves:
        rows = curve.rows.sort_values("world_size")
        left.plot(rows["world_size"], rows["samples_per_s"], **curve.line)
        band = rows["samples_per_s_min"], rows["samples_per_s_max"]
        left.fill_between(rows["world_size"], *band, color=curve.color, alpha=0.15, lw=0)
        right.plot(rows["world_size"], rows["efficiency"], **curve.line)
    right.axhline(1, **TARGET_LINE)
    plain_log(left.yaxis)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes)
        axes.minorticks_off()
        plain_ticks(axes.xaxis)
        axes.set_xlabel("workers")
    left.set_ylabel("samples per second")
    right.set(ylabel="efficiency (%)", ylim=(0, None))
    show_percent(right)
    handles = [curve.handle(curve.rows["num_seeds"].max()) for curve in curves]
    head(figure, title, [*handles, Line2D([], [], label="linear", **TARGET_LINE)])
    return figure


@style()
def draw_times(numbers: pd.DataFrame, title: str) -> Figure:
    """Stacked bars of the milliseconds of one step, the total at their ends. Takes ``time_numbers``."""
    curves = _curves(numbers)
    figure = new_figure(COLUMN_INCHES, 1.1 + 0.22 * len(curves))
    axes = figure.subplots()
    rows = pd.concat([curve.rows for curve in curves])
    names = [f"{curve.name} (n={count})" for curve, count in zip(curves, rows["num_seeds"], strict=True)]
    left = np.zeros(len(rows))
    for stage, fill in STAGE_FILLS.items():
        width = rows[f"{stage}_ms"].to_numpy()
        axes.barh(names, width, left=left, height=0.65, **fill)
        left += width
    for place, total in enumerate(rows["total_ms"]):
        axes.annotate(
            f"{total:.3g}", (total, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7
        )
    axes.set(xlabel="time per step (ms)", xlim=(0, 1.16 * rows["total_ms"].max()))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    head(figure, title, [Patch(label=stage, **fill) for stage, fill in STAGE_FILLS.items()])
    return figure


@style()
def draw_methods(numbers: pd.DataFrame, metric: Metric, title: str) -> Figure:
    """A measure and the bytes of every method, a line each; a bar spans the seeds. Takes rows of ``summarise``.

    The density that most methods were asked for is drawn full, another one hollow, with the density beside it.
    """
    names = [label(str(row["sparsifier"]), str(row["variant"])) for _, row in numbers.iterrows()]
    lines = list(dict.fromkeys(names))
    figure = new_figure(PAGE_INCHES, 1.0 + 0.16 * len(lines))
    left, right = figure.subplots(1, 2, sharey=True)
    usual = numbers.loc[numbers["density"] < 1, "density"].mode().max()
    for name, (_, row) in zip(names, numbers.iterrows(), strict=True):
        height, color, others = (
            lines.index(name),
            look(str(row["sparsifier"])).color,
            row["density"] not in (1.0, usual),
        )
        mark: LineSettings = {"color": color, "marker": "o", "markerfacecolor": "white" if others else color}
        left.hlines(height, row[f"{metric.key}_min"], row[f"{metric.key}_max"], color=color, linewidth=0.8)
        left.plot(row[metric.key], height, **mark)
        right.plot(row["bytes_sent"], height, linestyle="none", **mark)
        if others:
            twin = numbers[(numbers["sparsifier"] == row["sparsifier"]) & (numbers["density"] == usual)]["bytes_sent"]
            side = -1 if (twin > row["bytes_sent"]).any() else 1  # away from the method's other point
            right.annotate(
                f"{row['density']:.2g}",
                (row["bytes_sent"], height),
                xytext=(4 * side, 0),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="center",
                fontsize=5.5,
            )
    left.set_yticks(range(len(lines)), lines)
    left.set_ylim(len(lines) - 0.5, -0.5)  # the first on top, no marker cut
    show_metric(left.xaxis, metric)
    left.set(xlabel=f"{metric.label}, mean and range over seeds")
    right.set(xlabel="sent per step and worker")
    right.margins(x=0.18)
    plain_log(right.xaxis)
    right.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    handles = [Line2D([], [], label=f"density {usual:g}, or everything", color=BLACK, marker="o", linestyle="none")]
    if not numbers["density"].isin([1.0, usual]).all():
        hollow: LineSettings = {"color": BLACK, "marker": "o", "markerfacecolor": "white", "linestyle": "none"}
        handles.append(Line2D([], [], label="the density beside it", **hollow))
    head(figure, title, handles)
    return figure


@style()
def draw_rules(frame: pd.DataFrame, title: str) -> Figure:
    """Density, and below it the threshold, over steps: one column of panels per rule, one line per stream.

    Args:
        frame: tidy, columns rule, step, density, target_density, threshold, stream. Without a threshold anywhere
            the lower row is left out.
    """
    rules = [*(rule for rule in RULES if rule in set(frame["rule"])), *sorted(set(frame["rule"]) - set(RULES))]
    measures = ["density", "threshold"] if frame["threshold"].notna().any() else ["density"]
    figure = new_figure(PAGE_INCHES, 0.9 + 1.3 * len(measures))
    grid = figure.subplots(len(measures), len(rules), sharex=True, sharey="row", squeeze=False)
    streams = list(dict.fromkeys(frame["stream"]))
    for place, rule in enumerate(rules):
        rows = frame[frame["rule"] == rule]
        for axes, measure in zip(grid[:, place], measures, strict=True):
            for number, stream in enumerate(streams):
                line = rows[rows["stream"] == stream]
                axes.plot(line["step"], line[measure], **_stream_line(number))
        target = rows.groupby("step")["target_density"].first()
        grid[0, place].plot(target.index, target, **TARGET_LINE)
        grid[0, place].set_title(rule)
        grid[-1, place].set_xlabel("step")
    for axes, measure in zip(grid[:, 0], measures, strict=True):
        axes.set_ylabel(measure)
        plain_log(axes.yaxis)
    handles = [Line2D([], [], label=stream, **_stream_line(place)) for place, stream in enumerate(streams)]
    head(figure, title, [*handles, Line2D([], [], label="target", **TARGET_LINE)])
    return figure


def _curves(numbers: pd.DataFrame) -> list[Curve]:
    """The methods of ``numbers`` in their fixed order; variants of one method alone are told apart by colour."""
    curves = []
    methods = in_order(numbers["sparsifier"])
    for sparsifier in methods:
        variants = numbers[numbers["sparsifier"] == sparsifier].groupby("variant")
        for place, (variant, rows) in enumerate(variants):
            line = _variant_line(place) if len(methods) == 1 and len(variants) > 1 else _line(sparsifier, place)
            curves.append(Curve(name=label(sparsifier, str(variant)), line=line, rows=rows))
    return curves


def _variant_line(place: int) -> LineSettings:
    colors = (BLACK, *PALETTE[:-1])
    return {
        "color": colors[place % len(colors)],
        "linestyle": DASHES[place % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def _line(sparsifier: str, place: int) -> LineSettings:
    """Line settings of a method; its second and further variants keep colour and marker, hollow, in other dashes."""
    method = look(sparsifier)
    line = {"color": method.color, "linestyle": method.dashes, "marker": method.marker}
    if place == 0:
        return line
    others = [dashes for dashes in DASHES if dashes != method.dashes]
    return line | {"linestyle": others[(place - 1) % len(others)], "markerfacecolor": "white"}


def _stream_line(place: int) -> LineSettings:
    return {"color": PALETTE[place % len(PALETTE)], "linestyle": DASHES[place % len(DASHES)], "linewidth": 0.8}


def _draw_band(axes: Axes, curve: Curve, x: pd.Series, key: str, place: int) -> None:
    """Draw the mean over seeds as a line, from the least to the greatest as a band; ``place`` spreads the markers."""
    rows, every = curve.rows, max(1, len(curve.rows) // 8)
    axes.plot(x, rows[key], markevery=(place % every, every), **curve.line)
    axes.fill_between(x, rows[f"{key}_min"], rows[f"{key}_max"], color=curve.color, alpha=0.15, lw=0)


def _draw_seeds(axes: Axes, curve: Curve, column: str, place: int) -> None:
    for _, seed in curve.rows.groupby("seed"):
        axes.plot(seed["step"], seed[column], color=curve.color, linewidth=0.4, alpha=0.4)
    mean = curve.rows.groupby("step")[column].mean()
    every = max(1, len(mean) // 6)
    axes.plot(mean.index, mean, markevery=(place * every // len(MARKERS) % every, every), **curve.line)


def _log_with_zero(axes: Axes, values: pd.Series) -> None:
    """Logarithmic above the smallest decade that matters, linear down to zero: an exact method has no error."""
    least = values[values > 0].min()
    decade = 1e-3 if np.isnan(least) else max(1e-4, 10 ** np.floor(np.log10(least)))
    axes.set_yscale("symlog", linthresh=decade)
    axes.set_ylim(bottom=-0.4 * decade)
    plain_ticks(axes.yaxis)


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds > 2 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if seconds > 5 * 60 else (1.0, "s")


def _byte_unit(count: float) -> tuple[float, str]:
    if count > 2e9:
        return 1e9, "GB"
    return (1e6, "MB") if count > 2e6 else (1e3, "kB")
