"""Tables of runs, each made of rows of ``forms``: in Markdown, or on a terminal."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.reports.columns import COLUMNS, heading
from experiments.reports.forms import GRADIENTS, STEPS, at_best_rate, sign_of, with_goal
from experiments.reports.markdown import table as markdown_table
from experiments.reports.measures import metric_of
from experiments.reports.names import label
from experiments.reports.table import FORM, TRAINING

Columns = Sequence[str]


@dataclass(frozen=True, slots=True)
class Cells:
    """A table in words: its headings and its lines; without lines it is left out."""

    headings: Sequence[str]
    lines: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return it in Markdown, empty where it has no lines."""
        return markdown_table(self.headings, self.lines) if self.lines else ""

    def on_terminal(self, title: str) -> Table:
        """Return it for a terminal, narrow enough for 80 characters where Markdown is wider."""
        table = Table(
            title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for place, name in enumerate(self.headings):
            short = re.sub(", ms| a step|(?<=[GM])bit/s| (?=[GM]bit)|,", "", name)
            table.add_column(short, justify="right" if place else "left", no_wrap=True)
        for line in self.lines:
            table.add_row(*line)
        return table


def all_forms(rows: pd.DataFrame, columns: Columns) -> Cells:
    """A row per form."""
    if rows.empty:
        return Cells([], [])
    if "keeps up" in columns:
        rows = with_goal(rows)
    return Cells([heading(name, rows) for name in columns], [_cells(row, columns) for _, row in rows.iterrows()])


def timed(rows: pd.DataFrame, columns: Columns) -> Cells:
    """The forms whose steps were timed; without links where workers were simulated, or one was alone."""
    if rows["step_1gbit_s"].isna().all():
        columns = [name for name in columns if "bit/s" not in name]
    return all_forms(rows[rows["total_s"].notna()], columns)


def reached(rows: pd.DataFrame, columns: Columns) -> Cells:
    """The forms that have dense training beside them, where there are others than dense."""
    beside = rows[rows["to_dense"].notna()]
    return all_forms(beside if (beside["sparsifier"] != "dense").any() else beside[:0], columns)


def best_rates(rows: pd.DataFrame, columns: Columns) -> Cells:
    """The forms that were tried at several rates, each at the best of them."""
    return all_forms(at_best_rate(rows[rows["trials"] > 1]), columns)


def across_rates(rows: pd.DataFrame, columns: Columns) -> Cells:
    """A row per form at the best of its rates, and its measure at each rate, empty where that was not tried."""
    rates = sorted(rows["rate"].unique())
    lines = []
    for _, best in at_best_rate(rows).iterrows():
        own = rows[(rows[[*TRAINING, *FORM[:3]]] == best[[*TRAINING, *FORM[:3]]]).all(axis=1)].set_index("rate")
        metric = metric_of([best["metric"]])
        at_rates = [metric.format(own.loc[rate, "value"]) if rate in own.index else "" for rate in rates]
        lines.append([*_cells(best, columns), *at_rates])
    return Cells([*(heading(name, rows) for name in columns), *(f"at {rate:g}" for rate in rates)], lines)


def smallest_densities(rows: pd.DataFrame, columns: Columns) -> Cells:
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
    names = [heading(name, rows) for name in columns]
    return Cells(["method", "keeps up at", *names, "fails at"], lines)


def pairs(rows: pd.DataFrame, columns: Columns) -> Cells:
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
    return Cells([*(heading(name, rows) for name in columns), "gain"], ordered)


def _cells(row: pd.Series, columns: Columns) -> list[str]:
    return [COLUMNS[name](row) for name in columns]


def _failed(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "none tried"
    row = rows.iloc[0]
    return f"{row['density']:g}: {metric_of([row['metric']]).format(row['to_dense'])} (n = {row['num_seeds']:g})"


KINDS: dict[str, Callable[[pd.DataFrame, Columns], Cells]] = {
    "all": all_forms,
    "timed": timed,
    "reached": reached,
    "best": best_rates,
    "across": across_rates,
    "smallest": smallest_densities,
    "pairs": pairs,
}
