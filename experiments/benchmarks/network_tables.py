"""The tables, the figure and the page of ``experiments.bench network``."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console
from rich.table import Table

from experiments.reports.figure_parts import head, new_figure
from experiments.reports.markdown import table as markdown_table
from experiments.reports.plot_style import BLUE, PAGE_INCHES, VERMILLION, style
from experiments.runs.manifest import cpu_model

TICKS = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
GOAL = 1.15  # of a step over its bound
PREDICTED = "predicted_share"
ON_THE_PAGE_ALONE = ("least", "most", "steps", "samples/s", "counted MB")
AGREES = 0.1  # a prediction that is off by no more
Columns = Mapping[str, tuple[str, float, str]]  # by title: a column of the frame, its factor, how it is written
STEPS: Columns = {
    "step s": ("step_s", 1, "{:.4g}"),
    "least": ("least_s", 1, "{:.3g}"),
    "most": ("most_s", 1, "{:.3g}"),
    "steps": ("num_steps", 1, "{:.0f}"),
    "compute s": ("compute_s", 1, "{:.3g}"),
    "wire s": ("wire_s", 1, "{:.3g}"),
    "step / max": ("over_bound", 1, "{:.2f}"),
    "samples/s": ("samples_per_s", 1, "{:.4g}"),
    "times DDP": ("times_ddp", 1, "{:.2f}"),
    "link MB": ("link_bytes", 1e-6, "{:.4g}"),
    "counted MB": ("counted_bytes", 1e-6, "{:.4g}"),
    "link / counted": ("link_share", 1, "{:.3f}"),
    "predicted s": ("predicted_s", 1, "{:.4g}"),
    "predicted / step": ("predicted_share", 1, "{:.2f}"),
}
PARTS: Columns = {
    "over max ms": ("over_ms", 1, "{:.1f}"),
    "forward and update": ("ends_ms", 1, "{:+.1f}"),
    "backward": ("slowed_ms", 1, "{:+.1f}"),
    "after backward": ("exposed_s", 1e3, "{:.1f}"),
    "predicted": ("predicted_exposed_s", 1e3, "{:.1f}"),
    "select": ("select_s", 1e3, "{:.1f}"),
    "rest": ("rest_s", 1e3, "{:.1f}"),
    "predicted both": ("predicted_select_s", 1e3, "{:.1f}"),
    "in collectives": ("exchange_s", 1e3, "{:.1f}"),
    "processor": ("added_cpu_ms", 1, "{:+.1f}"),
    "of it in the kernel": ("added_kernel_ms", 1, "{:+.1f}"),
}
NOTES = """\
- *step s*: median over steps of the slowest rank's, with the *least* and the *most*. *compute s*: the same step without
  communication, taken beside each of them. *wire s*: bytes on the link with headers of full segments at the link's
  rate. *step / max*: over the larger of the two, which no step can beat.
- *link MB*: payload per host and step by the kernel's counters (headers taken off); *counted MB*: what the method
  counts itself; torch's hooks have closed forms.
- *predicted s*: from gradients' times, selections and collectives profiled on the same hosts in the same run, scaled to
  the computation beside the steps, less what a link that has rested is ahead of its rate. torch's PowerSGD hook has no
  model."""
NOTES_OF_PARTS = """\
Where a step goes, in ms, as medians over steps and ranks: by how much *forward and update*, and *backward* up to its
last gradient, take longer than in the step without communication; how long the step waits *after backward*, and what is
*predicted* of that; what a reduction takes to *select*, for the *rest* of its computation (*predicted both* together),
and *in collectives*, waits included, hidden or not; the *processor*'s time that a rank's process uses more than without
communication, and *of it in the kernel*, as TCP does (a mean: it is counted coarsely). For DDP and torch's hooks
*backward* includes the wait."""


def compared(frame: pd.DataFrame, dense_method: str) -> pd.DataFrame:
    """Add what follows from the numbers: how much faster than DDP, how well bytes and predictions agree, the parts."""
    dense = frame[frame["method"] == dense_method].set_index("rate")["step_s"]
    parts = {name: pd.Series(math.nan, frame.index) for name in ("exposed_s", "select_s", "rest_s", "exchange_s")}
    frame = frame.assign(**{name: column for name, column in parts.items() if name not in frame})
    bound = frame[["compute_s", "wire_s"]].max(axis="columns")
    ends, alone_ends = (frame[f"{p}forward_s"] + frame[f"{p}update_s"] for p in ("", "alone_"))
    return frame.assign(
        times_ddp=frame["rate"].map(dense) / frame["step_s"],
        link_share=frame["link_bytes"] / frame["counted_bytes"],
        predicted_share=frame["predicted_s"] / frame["step_s"],
        over_bound=frame["step_s"] / bound,
        over_ms=1e3 * (frame["step_s"] - bound),
        ends_ms=1e3 * (ends - alone_ends),
        slowed_ms=1e3 * (frame["backward_s"] - frame["exposed_s"].fillna(0.0) - frame["alone_backward_s"]),
        added_cpu_ms=1e3 * (frame["cpu_s"] - frame["alone_cpu_s"]),
        added_kernel_ms=1e3 * (frame["kernel_s"] - frame["alone_kernel_s"]),
    )


def print_tables(frame: pd.DataFrame, title: str, console: Console) -> None:
    """Print what each step takes, and where it goes."""
    steps = {name: column for name, column in STEPS.items() if name not in ON_THE_PAGE_ALONE}
    for columns, what in ((steps, ""), (PARTS, "; where a step goes, ms")):
        table = Table(title=f"{title}{what}")
        table.add_column("link")
        table.add_column("method")
        for name in columns:
            table.add_column(name, justify="right")
        for row in frame.to_dict("records"):
            table.add_row(row["rate"], row["title"], *_cells(row, columns))
        console.print(table)


def page(frame: pd.DataFrame, title: str, command: str) -> str:
    """Return the tables as Markdown, with the command, the machine, the spread, and what misses its goal."""
    machine = f"{os.cpu_count()} cores of {cpu_model()}, torch {torch.__version__}, gloo, Python"
    blocks = [
        "# Training over links of a known rate",
        f"`{command}` (root; {machine} {platform.python_version()})",
        f"{title}; hosts are network namespaces of one machine with one rank each, links shaped in both directions.",
        NOTES,
    ]
    for rate, rows in frame.groupby("rate", sort=False):
        blocks += [f"## {rate}", _markdown(rows, STEPS), NOTES_OF_PARTS, _markdown(rows, PARTS), _missing(rows)]
    return "\n\n".join(blocks) + "\n"


def _missing(rows: pd.DataFrame) -> str:
    """Say which methods are far from their bound, and which predictions are off."""
    records = rows.to_dict("records")
    slow = [f"{row['title']} {row['over_bound']:.2f}" for row in records if row["over_bound"] > GOAL]
    off = [f"{row['title']} {row[PREDICTED]:.2f}" for row in records if abs(row[PREDICTED] - 1) > AGREES]
    return (
        f"More than {GOAL - 1:.0%} above the larger of computation and wire: {', '.join(slow) or 'none'}. "
        f"Predictions off by more than {AGREES:.0%}: {', '.join(off) or 'none'}."
    )


def _markdown(rows: pd.DataFrame, columns: Columns) -> str:
    return markdown_table(
        ["method", *columns], [[row["title"], *_cells(row, columns)] for row in rows.to_dict("records")]
    )


def _cells(row: Mapping[Any, Any], columns: Columns) -> list[str]:
    return ["-" if math.isnan(row[key]) else form.format(factor * row[key]) for key, factor, form in columns.values()]


@style()
def draw(frame: pd.DataFrame, title: str) -> Figure:
    """A step's time by method, measured (from the fastest to the slowest step) and predicted, a panel per rate."""
    rates = list(dict.fromkeys(frame["rate"]))
    names = list(dict.fromkeys(frame["title"]))
    figure = new_figure(PAGE_INCHES, 1.2 + 0.26 * len(names))
    panels: Sequence[Any] = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, rate in zip(panels, rates, strict=True):
        rows = frame[frame["rate"] == rate]
        places = [names.index(name) for name in rows["title"]]
        axes.hlines(places, rows["least_s"], rows["most_s"], color=BLUE, linewidth=2.5, alpha=0.5)
        handles = [
            axes.scatter(rows["step_s"], places, s=22, color=BLUE, zorder=3, label="measured"),
            axes.scatter(rows["predicted_s"], places, s=34, marker="|", color=VERMILLION, zorder=4, label="predicted"),
        ]
        axes.set(xscale="log", xlabel=f"seconds of a step at {rate}", yticks=range(len(names)), yticklabels=names)
        first, last = 0.8 * min(frame["least_s"].min(), frame["predicted_s"].min()), 1.25 * frame["most_s"].max()
        ticks = [tick for tick in TICKS if first <= tick <= last]
        axes.set(xlim=(first, last), xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0].invert_yaxis()
    head(figure, title, handles)
    return figure
