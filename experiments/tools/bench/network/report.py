"""The tables and the figure of ``bench network``."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from experiments.reports.figure_parts import head, new_figure
from experiments.reports.plot_style import BLUE, PAGE_INCHES, VERMILLION, style
from experiments.tools.bench.network.ways import DDP
from experiments.tools.bench.tables import Column, Columns, table

TICKS = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
GOAL = 1.15  # largest step time / lower bound
AGREES = 0.1  # tolerated relative error of a prediction
HOSTS = "hosts are network namespaces of one machine with one rank each, links shaped in both directions"
STEPS: Columns = {
    "method": Column("title"),
    "batch s": Column("step_s", "{:.4g}"),
    "least": Column("least_s", "{:.3g}"),
    "most": Column("most_s", "{:.3g}"),
    "batches": Column("num_steps", "{:.0f}"),
    "compute s": Column("compute_s", "{:.3g}"),
    "wire s": Column("wire_s", "{:.3g}"),
    "batch / max": Column("over_bound", "{:.2f}"),
    "samples/s": Column("samples_per_s", "{:.4g}"),
    "times DDP": Column("times_ddp", "{:.2f}"),
    "link MB": Column("link_bytes", "{:.4g}", 1e-6),
    "counted MB": Column("counted_bytes", "{:.4g}", 1e-6),
    "link / counted": Column("link_share", "{:.3f}"),
    "predicted s": Column("predicted_s", "{:.4g}"),
    "predicted / batch": Column("predicted_share", "{:.2f}"),
}
NOTES = """\
- *batch s*: seconds for each batch of a worker, the median over exchanges of the slowest rank's, with the *least* and
  the *most*: an exchange after H steps counts once in H. *compute s*: the same without communication. *wire s*: bytes
  on the link with headers of full segments at the link's rate. *batch / max*: over the larger of the two, which none
  can beat.
- *link MB*: payload per host and batch by the kernel's counters (headers taken off); *counted MB*: what the method
  counts itself; torch's own have closed forms.
- *predicted s*: by what `experiments.profile` measures on the same hosts in the same run, gradients' times scaled to
  the computation beside the steps, less what a link that has rested is ahead of its rate. Of local steps and of
  gradients that are added up: computation, 50 us a message of a ring, and the bytes that were sent, nothing hidden."""


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Add derived columns: speed-up over DDP, and agreement of bytes and predictions."""
    dense = frame[frame["method"] == DDP].set_index("rate")["step_s"]
    return frame.assign(
        times_ddp=frame["rate"].map(dense) / frame["step_s"],
        link_share=frame["link_bytes"] / frame["counted_bytes"],
        predicted_share=frame["predicted_s"] / frame["step_s"],
        over_bound=frame["step_s"] / frame[["compute_s", "wire_s"]].max(axis="columns"),
    )


def blocks(frame: pd.DataFrame, title: str) -> Iterator[str]:
    """Yield the page's paragraphs and tables; for each rate, missed goals come last."""
    yield f"{title}; {HOSTS}."
    yield NOTES
    for rate, rows in frame.groupby("rate", sort=False):
        yield from (f"## {rate}", table(rows, STEPS))
        slow = _named(rows, "over_bound", rows["over_bound"] > GOAL)
        off = _named(rows, "predicted_share", (rows["predicted_share"] - 1).abs() > AGREES)
        yield (
            f"More than {GOAL - 1:.0%} above the larger of computation and wire: {slow}. "
            f"Predictions off by more than {AGREES:.0%}: {off}."
        )


def _named(rows: pd.DataFrame, key: str, chosen: "pd.Series[bool]") -> str:
    """Return the titles of chosen rows with a value of each."""
    return "; ".join(f"{row['title']} {row[key]:.2f}" for _, row in rows[chosen].iterrows()) or "none"


@style()
def draw(frame: pd.DataFrame, title: str) -> Figure:
    """Draw the time of a step by method, measured (fastest to slowest step) and predicted, one panel per rate."""
    rates, names = list(dict.fromkeys(frame["rate"])), list(dict.fromkeys(frame["title"]))
    figure = new_figure(PAGE_INCHES, 1.2 + 0.26 * len(names))
    panels: Sequence[Any] = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    first, last = 0.8 * min(frame["least_s"].min(), frame["predicted_s"].min()), 1.25 * frame["most_s"].max()
    ticks = [tick for tick in TICKS if first <= tick <= last]
    for axes, rate in zip(panels, rates, strict=True):
        rows = frame[frame["rate"] == rate]
        places = [names.index(name) for name in rows["title"]]
        axes.hlines(places, rows["least_s"], rows["most_s"], color=BLUE, linewidth=2.5, alpha=0.5)
        handles = [
            axes.scatter(rows["step_s"], places, s=22, color=BLUE, zorder=3, label="measured"),
            axes.scatter(rows["predicted_s"], places, s=34, marker="|", color=VERMILLION, zorder=4, label="predicted"),
        ]
        axes.set(xscale="log", xlabel=f"seconds of a batch at {rate}", yticks=range(len(names)), yticklabels=names)
        axes.set(xlim=(first, last), xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0].invert_yaxis()
    head(figure, title, handles)
    return figure
