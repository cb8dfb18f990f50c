"""Figures of where methods gain: borders of bandwidth, and gains of merged gradients beside the published."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from experiments.reports.figure_parts import handles_of, head, new_figure
from experiments.reports.names import human, in_order, label
from experiments.reports.plot_style import (
    BLACK,
    BLUE,
    DASHDOT,
    DASHED,
    DOTTED,
    VERMILLION,
    LineSettings,
    lines_of,
    plain,
    style,
)
from experiments.studies.simulated_steps.labels import rate_name
from experiments.studies.simulated_steps.speedup_figures import figure_width

PUBLISHED_LINE: LineSettings = {"color": BLACK, "linestyle": "-", "linewidth": 0.8}
READINGS: dict[tuple[str, int], LineSettings] = {
    ("layer", 16): {"color": BLUE, "linestyle": "-"},
    ("layer", 8): {"color": BLUE, "linestyle": DASHED},
    ("tensor", 16): {"color": VERMILLION, "linestyle": DASHDOT},
    ("tensor", 8): {"color": VERMILLION, "linestyle": DOTTED},
}


@style()
def draw_borders(numbers: pd.DataFrame, title: str, rates: tuple[float, float]) -> Figure:
    """Up to which rate each method is faster than dense, over workers; columns model, method, workers, border.

    A border beyond the rates looked at is drawn at their end.
    """
    models, methods = list(dict.fromkeys(numbers["model"])), in_order(numbers["method"])
    lines, (low, high) = lines_of(methods), rates
    figure = new_figure(figure_width(models), 3.2)
    grid = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(grid, models, strict=True):
        for method in methods:
            rows = numbers[(numbers["model"] == model) & (numbers["method"] == method)]
            axes.plot(rows["border"].clip(low, high), rows["workers"], clip_on=False, **lines[method])
        axes.set_title(plain(human(model)))
        axes.set(xscale="log", xlim=rates, xlabel="bandwidth of a link (bit/s)")
        axes.xaxis.set_major_locator(LogLocator(numticks=8))
        axes.xaxis.set_major_formatter(lambda value, _: rate_name(value))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yscale("log", base=2)
        axes.set_yticks(sorted(numbers["workers"].unique()))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    grid[0].set_ylabel("workers")
    head(figure, title, handles_of({label(name): line for name, line in lines.items()}))
    figure.get_layout_engine().set(wspace=0.08)  # type: ignore[union-attr, call-arg]
    return figure


@style()
def draw_headline(numbers: pd.DataFrame, title: str) -> Figure:
    """Gains of merged gradients over the assumed computation, a column of panels per model.

    Columns model, grain, fitted_at, compute_s, over_layerwise, over_single, published_layerwise, published_single.
    """
    models = list(dict.fromkeys(numbers["model"]))
    highest = {against: numbers[f"published_{against}"].max() for against in ("layerwise", "single")}
    figure = new_figure(figure_width(models), 4.4)
    grid = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for column, model in enumerate(models):
        rows = numbers[numbers["model"] == model]
        for axes, against in zip(grid[:, column], ("layerwise", "single"), strict=True):
            published = float(rows[f"published_{against}"].iloc[0])
            axes.axhline(published, **PUBLISHED_LINE)
            axes.annotate(
                f"published {published:g}",
                (1, published),
                (0, 2),
                axes.get_yaxis_transform(),
                "offset points",
                ha="right",
            )
            for (grain, fitted_at), own in rows.groupby(["grain", "fitted_at"], sort=False):
                axes.plot(own["compute_s"], own[f"over_{against}"], **READINGS[grain, fitted_at])
            axes.set(xscale="log", ylim=(0.95, 1 + 2 * (highest[against] - 1)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        grid[0, column].set_title(plain(human(model)))
        grid[1, column].set_xlabel("assumed forward + backward of a worker (s)")
    grid[0, 0].set_ylabel("WFBP / MG-WFBP")
    grid[1, 0].set_ylabel("SyncEASGD / MG-WFBP")
    handles = [
        Line2D([], [], label=f"sent by {grain}, fit of {fitted_at} ranks", **line)
        for (grain, fitted_at), line in READINGS.items()
    ]
    head(figure, title, [*handles, Line2D([], [], label="published", **PUBLISHED_LINE)])
    return figure
