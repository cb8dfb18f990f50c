"""Figures of time: throughput over the number of workers, and the stages of a step."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.config.units import three_digits
from experiments.reports.figure_parts import draw_band, head, new_figure, plain_log, show_percent, show_values
from experiments.reports.frames import STAGES
from experiments.reports.method_curves import curves_of, legend_of
from experiments.reports.plot_style import (
    COLUMN_INCHES,
    GREEN,
    PAGE_INCHES,
    SKY,
    TARGET_LINE,
    VERMILLION,
    LineSettings,
    plain,
    style,
)

STAGE_FILLS: dict[str, LineSettings] = {
    stage: {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
    for stage, color, hatch in zip(STAGES, (SKY, VERMILLION, GREEN, "#dddddd"), ("", "////", "....", ""), strict=True)
}


@style()
def draw_throughput(numbers: pd.DataFrame, title: str) -> Figure:
    """Samples per second and scaling efficiency over the number of workers. Takes ``throughput_numbers``."""
    figure = new_figure(PAGE_INCHES, 2.7)
    left, right = figure.subplots(1, 2)
    curves = curves_of(numbers)
    for curve in curves:
        rows = curve.rows.sort_values("world_size")
        middle, low, high = (rows[f"samples_per_s{end}"] for end in ("", "_min", "_max"))
        draw_band(left, rows["world_size"], middle, low, high, curve.line)
        right.plot(rows["world_size"], rows["efficiency"], **curve.line)
    right.axhline(1, **TARGET_LINE)
    plain_log(left.yaxis)
    for axes in (left, right):
        show_values(axes.xaxis, numbers["world_size"])
        axes.set_xlabel("workers")
    left.set_ylabel("samples per second")
    right.set(ylabel="efficiency (%)", ylim=(0, None))
    show_percent(right)
    head(figure, title, [*legend_of(curves), Line2D([], [], label="linear", **TARGET_LINE)])
    return figure


@style()
def draw_times(numbers: pd.DataFrame, title: str) -> Figure:
    """Stacked bars of the milliseconds of one step, the total at their ends. Takes ``time_numbers``."""
    curves = curves_of(numbers)
    figure = new_figure(COLUMN_INCHES, 1.1 + 0.22 * len(curves))
    axes = figure.subplots()
    rows = pd.concat([curve.rows for curve in curves])
    names = [plain(f"{curve.name} (n={curve.num_seeds})") for curve in curves]
    left = np.zeros(len(rows))
    for stage, fill in STAGE_FILLS.items():
        width = rows[f"{stage}_ms"].to_numpy()
        axes.barh(names, width, left=left, height=0.65, **fill)
        left += width
    for place, total in enumerate(rows["total_ms"]):
        axes.annotate(
            three_digits(total), (total, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7
        )
    axes.set(xlabel="time per step (ms)", xlim=(0, 1.16 * rows["total_ms"].max()))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    head(figure, title, [Patch(label=stage, **fill) for stage, fill in STAGE_FILLS.items()])
    return figure
