"""The kinds of tables that a page may have; each is made of rows of ``forms``."""

from collections.abc import Callable, Sequence

import pandas as pd

from experiments.reports.keep_up_figure import with_goal
from experiments.reports.markdown import table
from experiments.reports.measures import metric_of
from experiments.reports.names import label
from experiments.reports.pages.columns import COLUMNS, heading
from experiments.reports.pages.forms import sign_of
from experiments.reports.pages.table import FORM, TRAINING

METHOD = ["sparsifier", "form"]
GRADIENTS, STEPS = "gradients", "each worker's own step"
Make = Callable[[pd.DataFrame, Sequence[str]], str]


def all_forms(rows: pd.DataFrame, columns: Sequence[str]) -> str:
    """A row per form."""
    if "keeps up" in columns:
        rows = with_goal(rows)
    return table([heading(name, rows) for name in columns], [_cells(row, columns) for _, row in rows.iterrows()])


def best_rates(rows: pd.DataFrame, columns: Sequence[str]) -> str:
    """The forms that were tried at several rates, each at the best of them."""
    best = at_best_rate(rows[rows["trials"] > 1])
    return all_forms(best, columns) if len(best) else ""


def across_rates(rows: pd.DataFrame, columns: Sequence[str]) -> str:
    """A row per form at the best of its rates, and its measure at each rate, empty where that was not tried."""
    rates = sorted(rows["rate"].unique())
    lines = []
    for _, best in at_best_rate(rows).iterrows():
        own = rows[(rows[[*TRAINING, *FORM[:3]]] == best[[*TRAINING, *FORM[:3]]]).all(axis=1)].set_index("rate")
        metric = metric_of([best["metric"]])
        at_rates = [metric.format(own.loc[rate, "value"]) if rate in own.index else "" for rate in rates]
        lines.append([*_cells(best, columns), *at_rates])
    return table([*(heading(name, rows) for name in columns), *(f"at {rate:g}" for rate in rates)], lines)


def smallest_densities(rows: pd.DataFrame, columns: Sequence[str]) -> str:
    """The smallest density at which each method keeps up with dense, and the largest smaller one at which it fails."""
    sparse = with_goal(rows)
    lines = []
    for method, own in sparse[sparse["sparsifier"] != "dense"].groupby(METHOD):
        own = own.sort_values("density")
        good, bad = own[own["keeps_up"]], own[~own["keeps_up"]]
        keeps = good["density"].min() if len(good) else float("inf")
        above = ", ".join(f"{target:g}" for target in bad["density"] if target > keeps)
        below = bad[bad["density"] < keeps].tail(1) if len(good) else bad.nlargest(1, "to_dense")
        first = f"{keeps:g}{f' (not at {above})' if above else ''}" if len(good) else "none tried"
        shown = _cells(good.iloc[0], columns) if len(good) else [""] * len(columns)
        lines.append([label(*map(str, method)), first, *shown, _failed(below)])
    names = [heading(name, rows) for name in columns]
    return table(["method", "keeps up at", *names, "fails at"], lines)


def pairs(rows: pd.DataFrame, columns: Sequence[str]) -> str:
    """By how much each worker's own step ends better than gradients, means of both at their best rates."""
    best = at_best_rate(rows[rows["form"].isin([GRADIENTS, STEPS])])
    metric, sign = metric_of(best["metric"]), sign_of(str(best["metric"].iloc[0]))
    keys = [*TRAINING, "density", "sparsifier"]
    lines = []
    for _, own in best.groupby(keys, sort=False):
        ends = own.set_index("form")["value"]
        if {GRADIENTS, STEPS} <= set(ends.index):
            gain = sign * (ends[STEPS] - ends[GRADIENTS])
            lines.append((gain, [*_cells(own.iloc[0], columns), metric.format(gain)]))
    ordered = [cells for _, cells in sorted(lines, key=lambda line: -line[0])]
    return table([*(heading(name, rows) for name in columns), "gain"], ordered) if ordered else ""


def at_best_rate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the row of each form with the best of its rates, the best form first."""
    gain = rows["metric"].map(sign_of) * rows["value"]
    ordered = rows.assign(gain=gain).sort_values("gain", ascending=False, kind="stable")
    return ordered.drop_duplicates([*TRAINING, *FORM[:3]]).drop(columns="gain")


def _cells(row: pd.Series, columns: Sequence[str]) -> list[str]:
    return [COLUMNS[name](row) for name in columns]


def _failed(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "none tried"
    row = rows.iloc[0]
    return f"{row['density']:g}: {metric_of([row['metric']]).format(row['to_dense'])} (n = {row['num_seeds']:g})"


KINDS: dict[str, Make] = {
    "all": all_forms,
    "best": best_rates,
    "across": across_rates,
    "smallest": smallest_densities,
    "pairs": pairs,
}
