"""Curves that were measured: points and the line that fits them, both axes logarithmic."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from experiments.reports.figure_parts import head, new_figure, plain_log, save
from experiments.reports.plot_style import MARKERS, PALETTE, style
from micro.planning.tables import Curve


@style()
def save_curves(
    curves: Mapping[Any, Curve],
    labels: Mapping[str, str],
    columns: tuple[str, str],
    title: str,
    x_name: str,
    path: Path,
) -> list[Path]:
    """Draw milliseconds over size beside a file; ``columns`` name both in its numbers. Returns the paths."""
    key, size = columns
    rows = [
        {key: name, size: x, "seconds": y, "fit_s": curve.alpha_s + curve.beta_s * x}
        for name, curve in curves.items()
        for x, y in zip(curve.sizes, curve.seconds, strict=True)
    ]
    numbers = pd.DataFrame(rows)
    figure = new_figure(4.0, 3.4)
    axes, handles = figure.subplots(), []
    for place, (name, own) in enumerate(numbers.groupby(key, sort=False)):
        line: dict[str, Any] = {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)]}
        axes.plot(own[size], 1e3 * own["seconds"], linestyle="none", **line)
        along = np.geomspace(own[size].min(), own[size].max(), 200)
        axes.plot(along, 1e3 * np.interp(along, own[size], own["fit_s"]), color=line["color"])  # bends on these axes
        handles.append(Line2D([], [], label=labels[str(name)], **line))
    axes.set(xlabel=x_name, ylabel="time (ms)", xscale="log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    plain_log(axes.yaxis)
    head(figure, title, handles)
    return save(figure, numbers, path.with_suffix(""))
