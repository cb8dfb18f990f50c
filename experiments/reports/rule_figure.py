"""The figure that compares rules of one method: density and threshold over steps."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reports.figure_numbers import RULES
from experiments.reports.figure_parts import head, new_figure, plain_log
from experiments.reports.plot_style import DASHES, PAGE_INCHES, PALETTE, TARGET_LINE, LineSettings, style


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


def _stream_line(place: int) -> LineSettings:
    return {"color": PALETTE[place % len(PALETTE)], "linestyle": DASHES[place % len(DASHES)], "linewidth": 0.8}
