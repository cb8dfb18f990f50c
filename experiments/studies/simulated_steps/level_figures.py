"""The figure of one level beside two: efficiency, and bytes sent to other nodes, over workers."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import handles_of, head, new_figure, show_percent
from experiments.reports.names import human, in_order, label
from experiments.reports.plot_style import GREY, GREY_LINE, PAGE_INCHES, LineSettings, lines_of, plain, style
from experiments.studies.simulated_steps.speedup_figures import powers_of_four


@style()
def draw_levels(numbers: pd.DataFrame, title: str) -> Figure:
    """Efficiency and bytes between nodes over workers, a column of panels per model and algorithm.

    Columns model, algorithm, workers, method, levels, efficiency, between_bytes. Two levels are whole lines with full
    marks, one level dashed ones with hollow marks.
    """
    panels = list(dict.fromkeys(zip(numbers["model"], numbers["algorithm"], strict=True)))
    lines = lines_of(in_order(numbers["method"]))
    figure = new_figure(PAGE_INCHES, 5.0)
    grid = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False)
    for (upper, lower), (model, algorithm) in zip(grid.T, panels, strict=True):
        rows = numbers[(numbers["model"] == model) & (numbers["algorithm"] == algorithm)]
        for (method, levels), own in rows.groupby(["method", "levels"], sort=False):
            line = _of_levels(lines[method], levels)
            upper.plot(own["workers"], own["efficiency"], **line)
            leaving = own[own["between_bytes"] > 0]
            lower.plot(leaving["workers"], leaving["between_bytes"], **line)
        upper.set_title(f"{plain(human(model))}, {algorithm}")
        _scale(upper, lower)
    grid[0, 0].set_ylabel("efficiency (% of linear)")
    grid[1, 0].set_ylabel("to other nodes, a worker and step")
    handles = handles_of({label(name): _of_levels(line, "two") for name, line in lines.items()})
    kinds: dict[str, LineSettings] = {
        "two levels": {"color": GREY, "linestyle": "-", "marker": "o"},
        "one level": {"color": GREY, "linestyle": "--", "marker": "o", "markerfacecolor": "white"},
    }
    handles += [Line2D([], [], label=name, **settings) for name, settings in kinds.items()]
    head(figure, title, handles)
    return figure


def _of_levels(line: LineSettings, levels: str) -> LineSettings:
    if line is GREY_LINE:
        return line
    return line | ({"linestyle": "--", "markerfacecolor": "white"} if levels == "one" else {"linestyle": "-"})


def _scale(upper: Axes, lower: Axes) -> None:
    upper.set_xscale("log", base=2)
    upper.set_ylim(0, 1.05)
    show_percent(upper)
    powers_of_four(lower.xaxis)
    lower.set(xlabel="workers", yscale="log")
    lower.yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    lower.yaxis.set_minor_formatter(NullFormatter())
