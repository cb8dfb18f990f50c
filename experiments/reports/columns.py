"""The columns of tables of runs: how each is headed, and what a row of ``forms`` shows there."""

from collections.abc import Callable

import pandas as pd

from experiments.config.units import human_bytes, three_digits
from experiments.reports.forms import SHARES
from experiments.reports.measures import metric_of
from experiments.reports.names import label

Show = Callable[[pd.Series], str]


def heading(name: str, rows: pd.DataFrame) -> str:
    """Return the heading of a column; the measure's is its own name."""
    return metric_of(rows["metric"]).column if name == "measure" else name


def _measure(row: pd.Series) -> str:
    if pd.isna(row["value"]):
        return "not finite"
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


def _of_sparse(column: str, scale: float = 1) -> Show:
    """A dense run has no target, so nothing that is measured against one; nor has one without an applied step."""
    return lambda row: "-" if row["sparsifier"] == "dense" or pd.isna(row[column]) else f"{scale * row[column]:.3g}"


def _milliseconds(column: str) -> Show:
    return lambda row: "-" if pd.isna(row[column]) else three_digits(1e3 * row[column])


def _step_on_link(link: str) -> Show:
    """Milliseconds of a step: as the stages of each run have them, else a share of the whole run's seconds."""

    def show(row: pd.Series) -> str:
        found = 1e3 * _first_known(row, f"step_{link}_s", f"at_{link}_s")
        of_run = pd.isna(row[f"step_{link}_s"])
        return three_digits(found / row["step"] if of_run else found)

    return show


def _first_known(row: pd.Series, first: str, second: str) -> float:
    return float(row[second] if pd.isna(row[first]) else row[first])


def _seconds(column: str) -> Show:
    return lambda row: "" if pd.isna(row[column]) else f"{row[column]:.3g}"


COLUMNS: dict[str, Show] = {
    "method": lambda row: label(row["sparsifier"]),
    "form": lambda row: label(row["sparsifier"], row["form"]),
    "what is exchanged": lambda row: str(row["form"]),
    "target": _of_sparse("target_density"),
    "rate": lambda row: f"{row['rate']:g}",
    "rates tried": lambda row: f"{row['trials']}",
    "epochs": lambda row: f"{row['epochs']}",
    "workers": lambda row: f"{row['world_size']}",
    "batch": lambda row: f"{row['batch_size']:g}",
    "n": lambda row: f"{row['num_seeds']:g}{'*' if row['is_mean'] else ''}",
    "measure": _measure,
    "to dense": _to_dense,
    "density": lambda row: "-" if pd.isna(row["measured_density"]) else f"{row['measured_density']:.3g}",
    "sent": lambda row: human_bytes(row["total_bytes"]),
    "error, %": _of_sparse("density_error", 100),
    "build-up": _of_sparse("build_up"),
    "sent a step": lambda row: human_bytes(row["step_bytes"]),
    "compute, ms": lambda row: three_digits(1e3 * _first_known(row, "step_compute_s", "compute_s")),
    **{f"{stage}, ms": _milliseconds(f"{stage}_s") for stage in ("select", "exchange", "rest", "total")},
    "1 Gbit/s, ms": _step_on_link("1gbit"),
    "100 Mbit/s, ms": _step_on_link("100mbit"),
    "of dense": lambda row: f"{100 * row['of_dense']:.3g} %",
    "sent, kB": _kilobytes,
    **{f"{100 * share:g} %": _reached_at(f"{100 * share:g}") for share in SHARES},
    "100 Mbit/s": _seconds("at_100mbit_s"),
    "1 Gbit/s": _seconds("at_1gbit_s"),
    "keeps up": lambda row: "yes" if row["keeps_up"] else "no",
    "code": lambda row: str(row["code"]),
    "manifests": lambda row: f"`{row['manifests']}`" if row["manifests"] else "-",
}
