"""The columns of tables of forms: how each is headed, and what a row of ``forms`` shows there."""

from collections.abc import Callable

import pandas as pd

from experiments.config.units import human_bytes
from experiments.reports.measures import metric_of
from experiments.reports.names import label
from experiments.reports.pages.forms import SHARES

Show = Callable[[pd.Series], str]


def heading(name: str, rows: pd.DataFrame) -> str:
    """Return the heading of a column; the measure's is its own name."""
    return metric_of(rows["metric"]).column if name == "measure" else name


def _measure(row: pd.Series) -> str:
    metric = metric_of([row["metric"]])
    spread = f" ± {metric.format(row['half_range'])}" if row["num_seeds"] > 1 else ""
    return f"{metric.format(row['value'])}{spread}"


def _to_dense(row: pd.Series) -> str:
    if pd.isna(row["to_dense"]):
        return ""
    text = metric_of([row["metric"]]).format(row["to_dense"])
    return text if text.startswith("-") else f"+{text}"


def _kilobytes(row: pd.Series) -> str:
    kilobytes = row["batch_bytes"] / 1e3
    if pd.isna(kilobytes):
        return ""
    return f"{kilobytes:.0f}" if kilobytes >= 100 else f"{kilobytes:.3g}"


def _reached_at(share: str) -> Show:
    def show(row: pd.Series) -> str:
        there, seeds = int(row[f"num_{share}"]), int(row["num_seeds"])
        if not there:
            return "never"
        some = f" ({there} of {seeds})" if there < seeds else ""
        return f"{human_bytes(row[f'bytes_{share}'])}, {row[f'epochs_{share}']:.3g}{some}"

    return show


def _of_sparse(show: Show) -> Show:
    return lambda row: "-" if row["sparsifier"] == "dense" else show(row)


def _milliseconds(column: str) -> Show:
    return lambda row: f"{1e3 * row[column]:.3g}"


def _step_on_link(column: str) -> Show:
    return lambda row: f"{1e3 * row[column] / row['step']:.3g}"


def _seconds(column: str) -> Show:
    return lambda row: "" if pd.isna(row[column]) else f"{row[column]:.3g}"


COLUMNS: dict[str, Show] = {
    "method": lambda row: label(row["sparsifier"]),
    "form": lambda row: label(row["sparsifier"], row["form"]),
    "what is exchanged": lambda row: str(row["form"]),
    "target": _of_sparse(lambda row: f"{row['density']:.3g}"),
    "rate": lambda row: f"{row['rate']:g}",
    "rates tried": lambda row: f"{row['trials']}",
    "epochs": lambda row: f"{row['epochs']}",
    "workers": lambda row: f"{row['world_size']}",
    "batch": lambda row: f"{row['batch_size']:g}",
    "n": lambda row: f"{row['num_seeds']:g}{'*' if row['is_mean'] else ''}",
    "measure": _measure,
    "to dense": _to_dense,
    "density": lambda row: f"{row['measured_density']:.3g}",
    "sent": lambda row: human_bytes(row["total_bytes"]),
    "error, %": _of_sparse(lambda row: f"{100 * row['density_error']:.3g}"),
    "build-up": _of_sparse(lambda row: f"{row['measured_density'] / row['density']:.3g}"),
    "sent a step": lambda row: human_bytes(row["batch_bytes"]),
    **{f"{stage}, ms": _milliseconds(f"{stage}_s") for stage in ("compute", "select", "exchange", "rest", "total")},
    "1 Gbit/s, ms": _step_on_link("at_1gbit_s"),
    "100 Mbit/s, ms": _step_on_link("at_100mbit_s"),
    "of dense": lambda row: f"{100 * row['of_dense']:.3g} %",
    "sent, kB": _kilobytes,
    **{f"{100 * share:g} %": _reached_at(f"{100 * share:g}") for share in SHARES},
    "100 Mbit/s": _seconds("at_100mbit_s"),
    "1 Gbit/s": _seconds("at_1gbit_s"),
    "keeps up": lambda row: "yes" if row["keeps_up"] else "no",
    "code": lambda row: str(row["code"]),
    "manifests": lambda row: f"`{row['manifests']}`" if row["manifests"] else "-",
}
