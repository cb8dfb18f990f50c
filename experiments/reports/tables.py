"""Make the tables of pages from rows of ``forms``: frames of text, by kind and columns."""

from collections.abc import Callable, Sequence

import pandas as pd

from experiments.config.units import human_bytes, three_digits
from experiments.reports.forms import GRADIENTS, SHARES, STEPS, at_best_rate, sign_of, with_goal
from experiments.reports.measures import metric_of
from experiments.reports.names import label
from experiments.reports.table import FORM, TRAINING

Columns = Sequence[str]
Show = Callable[[pd.Series], str]


def _number(column: str, form: str | Callable[[float], str] = "{:.3g}", scale: float = 1, missing: str = "-") -> Show:
    write = form.format if isinstance(form, str) else form
    return lambda row: missing if pd.isna(row[column]) else write(scale * row[column])


def _of_sparse(column: str, scale: float = 1) -> Show:
    """A dense run has no target, so nothing that is measured against one."""
    return lambda row: "-" if row["sparsifier"] == "dense" else _number(column, scale=scale)(row)


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


def _paired(row: pd.Series) -> str:
    known = row["num_seeds"] > 1 and row["sparsifier"] != "dense" and pd.notna(row["paired_range"])
    return _to_dense(row) + (f" ± {metric_of([row['metric']]).format(row['paired_range'])}" if known else "")


def _reached_at(share: str) -> Show:
    def show(row: pd.Series) -> str:
        there, seeds = int(row[f"num_{share}"]), int(row["num_seeds"])
        some = f" ({there} of {seeds})" if there < seeds else ""
        epochs = f"{row[f'epochs_{share}']:.3g}"
        return f"{human_bytes(row[f'bytes_{share}'])}, {epochs}{some}" if there else "never"

    return show


def _compute(row: pd.Series) -> str:
    return three_digits(1e3 * row["compute_s" if pd.isna(row["step_compute_s"]) else "step_compute_s"])


def _step_on_link(link: str) -> Show:
    """Milliseconds of a step: as the stages of each run have them, else a share of the whole run's seconds."""

    def show(row: pd.Series) -> str:
        own, whole = row[f"step_{link}_s"], row[f"at_{link}_s"]
        return three_digits(1e3 * (whole / row["step"] if pd.isna(own) else own))

    return show


COLUMNS: dict[str, Show] = {
    "method": lambda row: label(row["sparsifier"]),
    "form": lambda row: label(row["sparsifier"], row["form"]),
    "what is exchanged": lambda row: str(row["form"]),
    "target": _of_sparse("target_density"),
    "rate": _number("rate", "{:g}"),
    "rates tried": _number("trials", "{}"),
    "epochs": _number("epochs", "{}"),
    "workers": _number("world_size", "{}"),
    "batch": _number("batch_size", "{:g}"),
    "n": lambda row: f"{row['num_seeds']:g}{'*' if row['is_mean'] else ''}",
    "measure": _measure,
    "to dense": _to_dense,
    "to dense, by seed": _paired,
    "density": _number("measured_density"),
    "sent": _number("total_bytes", human_bytes),
    "error, %": _of_sparse("density_error", 100),
    "build-up": _of_sparse("build_up"),
    "sent a step": _number("step_bytes", human_bytes),
    "compute, ms": _compute,
    **{f"{stage}, ms": _number(f"{stage}_s", three_digits, 1e3) for stage in ("select", "exchange", "rest", "total")},
    "1 Gbit/s, ms": _step_on_link("1gbit"),
    "100 Mbit/s, ms": _step_on_link("100mbit"),
    "of dense": _number("of_dense", "{:.3g} %", 100, "nan %"),
    "sent, kB": _number("batch_bytes", lambda kilo: f"{kilo:.0f}" if kilo >= 100 else f"{kilo:.3g}", 1e-3, ""),
    **{f"{100 * share:g} %": _reached_at(f"{100 * share:g}") for share in SHARES},
    "100 Mbit/s": _number("at_100mbit_s", missing=""),
    "1 Gbit/s": _number("at_1gbit_s", missing=""),
    "keeps up": lambda row: "yes" if row["keeps_up"] else "no",
    "code": lambda row: str(row["code"]),
    "manifests": lambda row: f"`{row['manifests']}`" if row["manifests"] else "-",
}
"""What a row of ``forms`` shows in each column of a page; ``measure`` is headed by the name of the measure."""


def all_forms(rows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """A row per form."""
    if "keeps up" in columns:
        rows = with_goal(rows)
    return _frame([_cells(row, columns) for _, row in rows.iterrows()], rows, columns)


def timed(rows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """The forms whose steps were timed; without links where workers were simulated, or one was alone."""
    if rows["step_1gbit_s"].isna().all():
        columns = [name for name in columns if "bit/s" not in name]
    return all_forms(rows[rows["total_s"].notna()], columns)


def reached(rows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """The forms that have dense training beside them, where there are others than dense."""
    beside = rows[rows["to_dense"].notna()]
    return all_forms(beside if (beside["sparsifier"] != "dense").any() else beside[:0], columns)


def best_rates(rows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """The forms that were tried at several rates, each at the best of them."""
    return all_forms(at_best_rate(rows[rows["trials"] > 1]), columns)


def across_rates(rows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """A row per form at the best of its rates, and its measure at each rate, empty where that was not tried."""
    form = [*TRAINING, *FORM[:3]]
    at_rates = rows.assign(cell=[metric_of([row["metric"]]).format(row["value"]) for _, row in rows.iterrows()])
    wide = at_rates.pivot(index=form, columns="rate", values="cell").fillna("").add_prefix("at ")
    best = at_best_rate(rows)
    beside = best[form].merge(wide.reset_index(), on=form).drop(columns=form)
    return pd.concat([all_forms(best, columns), beside], axis=1)


def smallest_densities(rows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """The smallest density at which each method keeps up with dense, and the largest smaller one at which it fails."""
    sparse = with_goal(rows)
    lines = []
    for method, own in sparse[sparse["sparsifier"] != "dense"].groupby(["sparsifier", "form"]):
        own = own.sort_values("density")
        good, bad = own[own["keeps_up"]], own[~own["keeps_up"]]
        keeps = good["density"].min() if len(good) else float("inf")
        above = ", ".join(f"{target:g}" for target in bad["density"] if target > keeps)
        below = bad[bad["density"] < keeps].tail(1) if len(good) else bad.nlargest(1, "to_dense")
        first = f"{keeps:g}{f' (not at {above})' if above else ''}" if len(good) else "none tried"
        shown = _cells(good.iloc[0], columns) if len(good) else [""] * len(columns)
        lines.append([label(*map(str, method)), first, *shown, _failed(below)])
    return _frame(lines, rows, ["method", "keeps up at", *columns, "fails at"])


def pairs(rows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """By how much each worker's own step ends better than gradients, means of both at their best rates."""
    best = at_best_rate(rows[rows["form"].isin([GRADIENTS, STEPS])])
    metric, sign = metric_of(best["metric"]), sign_of(str(best["metric"].iloc[0]))
    lines = []
    for _, own in best.groupby([*TRAINING, "density", "sparsifier"], sort=False):
        ends = own.set_index("form")["value"]
        if {GRADIENTS, STEPS} <= set(ends.index):
            gain = sign * (ends[STEPS] - ends[GRADIENTS])
            lines.append((gain, [*_cells(own.iloc[0], columns), metric.format(gain)]))
    ordered = [cells for _, cells in sorted(lines, key=lambda line: -line[0])]
    return _frame(ordered, rows, [*columns, "gain"])


def _cells(row: pd.Series, columns: Columns) -> list[str]:
    return [COLUMNS[name](row) for name in columns]


def _frame(lines: Sequence[Sequence[str]], rows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    names = {"measure": metric_of(rows["metric"]).column} if len(rows) else {}
    return pd.DataFrame(lines, columns=[names.get(name, name) for name in columns])


def _failed(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "none tried"
    row = rows.iloc[0]
    return f"{row['density']:g}: {metric_of([row['metric']]).format(row['to_dense'])} (n = {row['num_seeds']:g})"


KINDS: dict[str, Callable[[pd.DataFrame, Columns], pd.DataFrame]] = {
    "all": all_forms,
    "timed": timed,
    "reached": reached,
    "best": best_rates,
    "across": across_rates,
    "smallest": smallest_densities,
    "pairs": pairs,
}
