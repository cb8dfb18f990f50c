"""The table and the page of ``experiments.bench network_rounds``."""

import os
import platform
from collections.abc import Sequence

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.network_tables import AGREES, Columns
from experiments.reports.link_times import FRAME, LATENCY_S
from experiments.reports.markdown import table as markdown_table
from experiments.reports.names import label
from experiments.runs.manifest import cpu_model

COLUMNS: Columns = {
    "batch s": ("step_s", 1, "{:.4g}"),
    "least": ("least_s", 1, "{:.3g}"),
    "most": ("most_s", 1, "{:.3g}"),
    "rounds": ("num_rounds", 1, "{:.0f}"),
    "times dense": ("times_dense", 1, "{:.2f}"),
    "compute s": ("compute_s", 1, "{:.3g}"),
    "link kB": ("link_bytes", 1e-3, "{:.4g}"),
    "counted kB": ("counted_bytes", 1e-3, "{:.4g}"),
    "link / counted": ("link_share", 1, "{:.3f}"),
    "simulated s": ("predicted_s", 1, "{:.4g}"),
    "measured / simulated": ("measured_share", 1, "{:.2f}"),
}
ON_THE_PAGE_ALONE = ("least", "most", "rounds", "counted kB")
NOTES = f"""\
- *batch s*: seconds for each batch of a worker, of the slowest rank: the mean over whole rounds, so that an exchange
  after H steps counts once in H; with the round of the *least* and of the *most*. *times dense*: how much faster than
  dense training with an exchange at every step. *compute s*: forward and backward of a batch, the median over steps.
- *link kB*: payload per host and batch by the kernel's counters (headers taken off); *counted kB*: what the method
  counts itself.
- *simulated s*: as [the page on equal tokens](equal_tokens.md) has it: the computation of a batch, the median over
  all forms at this rate and the same for all, and what rank 0 sent, {1e6 * LATENCY_S:g} us a message of a ring and
  {FRAME:.4g} bytes on the wire for each. Nothing is hidden, and selection and the optimizer are not in it. Nor is that
  hosts share the machine's cores, and that a link that has rested lets its first packets pass at once."""


def compared(frame: pd.DataFrame, rates: Sequence[str]) -> pd.DataFrame:
    """Return the rows by rate, with simulated seconds, and how they and the bytes agree with those measured."""
    frame = frame.sort_values("rate", key=lambda column: column.map(list(rates).index), kind="stable")
    dense = frame[frame["way"] == "dense"].set_index("rate")["step_s"]
    simulated = frame.groupby("rate")["compute_s"].transform("median") + frame["simulated_exchange_s"]
    return frame.assign(
        predicted_s=simulated,
        measured_share=frame["step_s"] / simulated,
        link_share=frame["link_bytes"] / frame["counted_bytes"],
        times_dense=frame["rate"].map(dense) / frame["step_s"],
    ).reset_index(drop=True)


def print_table(frame: pd.DataFrame, title: str, console: Console) -> None:
    """Print what a batch takes by each form."""
    table = Table(title=title)
    columns = {name: column for name, column in COLUMNS.items() if name not in ON_THE_PAGE_ALONE}
    for name in ("link", "form"):
        table.add_column(name)
    for name in columns:
        table.add_column(name, justify="right")
    for _, row in frame.iterrows():
        table.add_row(row["rate"], row["title"], *_cells(row, columns))
    console.print(table)


def page(frame: pd.DataFrame, title: str, command: str) -> str:
    """Return the tables as Markdown, with the command, the machine, and which simulations are off."""
    machine = f"{os.cpu_count()} cores of {cpu_model()}, torch {torch.__version__}, gloo, Python"
    blocks = [
        "# Local steps over links of a known rate",
        f"`{command}` (root; {machine} {platform.python_version()})",
        f"{title}; forms of the study `gpt_equal_tokens`. Hosts are network namespaces of one machine with one rank "
        "each, links shaped in both directions.",
        NOTES,
    ]
    for rate, rows in frame.groupby("rate", sort=False):
        cells = [[label(row["method"]), row["exchanged"], *_cells(row, COLUMNS)] for _, row in rows.iterrows()]
        blocks += [f"## {rate}", markdown_table(["method", "what is exchanged", *COLUMNS], cells), _off(rows)]
    return "\n\n".join(blocks) + "\n"


def _off(rows: pd.DataFrame) -> str:
    """Say by how much the simulated seconds are off."""
    share = rows["measured_share"]
    off = rows[(share - 1).abs() > AGREES]
    named = [f"{row['title']} {row['measured_share']:.2f}" for _, row in off.iterrows()]
    return (
        f"Measured over simulated: {share.min():.2f} to {share.max():.2f}. Off by more than {AGREES:.0%}: "
        f"{'; '.join(named) or 'none'}."
    )


def _cells(row: pd.Series, columns: Columns) -> list[str]:
    return ["-" if pd.isna(row[key]) else form.format(factor * row[key]) for key, factor, form in columns.values()]
