"""The smallest density at which each method keeps up with dense training, and what it sends there."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.config.units import human_bytes
from experiments.reports import earlier_rows
from experiments.reports.csv_files import write_csv
from experiments.reports.earlier_rows import REACHED, Earlier, Table
from experiments.reports.figure_parts import save
from experiments.reports.frames import Frames
from experiments.reports.keep_up_figure import draw_keep_up, goal_of
from experiments.reports.markdown import table as markdown_table
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import human, label
from experiments.reports.output import write_file
from experiments.reports.provenance import described
from experiments.reports.reached import means
from experiments.reports.run_rows import STUDY, origins_of, run_rows

FORM = ["sparsifier", "variant"]
TABLE = Table(name="keep_up", same=REACHED.same, more=REACHED.more)
NO_ROWS = Earlier(means=TABLE.empty())

EXPLAINED = """\
A method keeps up at a density where its mean over n seeds is at most a point below dense's (of perplexity: at most 2 %
above it). *Keeps up at* is the smallest target that does among those that were tried, *density* the share of elements
that its update touches, *sent* what rank 0 sent in the whole run, *of dense* its share of what dense sends. *Fails at*
is the largest smaller target that does not, with its distance to dense. A larger target that fails too is named. Where
no target keeps up, the nearest stands in *fails at*. Targets are few and have few seeds: a mean of one seed may lie on
the other side by chance. Methods with one target are left out."""


def with_goal(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of methods with several targets, and of dense, with ``keeps_up`` and ``of_dense``."""
    parts = []
    for _, own in rows.groupby(STUDY):
        metric, is_dense = metric_of(own["metric"]), own["sparsifier"] == "dense"
        if not is_dense.any():
            continue
        best = own[is_dense].nlargest(1, "to_dense").iloc[0]
        room = abs(goal_of(best["value"], metric) - best["value"])
        own = own.assign(keeps_up=own["to_dense"] >= -room, of_dense=own["total_bytes"] / best["total_bytes"])
        several = own.groupby(FORM)["density"].transform("nunique") > 1
        if (several & ~is_dense).any():
            parts.append(own[(several & ~is_dense) | (own.index == best.name)])
    return pd.concat(parts, ignore_index=True) if parts else rows.iloc[:0]


def smallest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method of one study: ``keeps`` and ``fails``, the targets that the table names, or None.

    Further columns: FORM, and ``also_fails``, the targets above ``keeps`` that do not keep up.
    """
    found = []
    for form, own in rows[rows["sparsifier"] != "dense"].groupby(FORM):
        good, bad = (sorted(own[own["keeps_up"] == wanted]["density"]) for wanted in (True, False))
        keeps = good[0] if good else None
        below = [target for target in bad if keeps is None or target < keeps]
        nearest = own[~own["keeps_up"]].nlargest(1, "to_dense")["density"]
        fails = max(below, default=None) if keeps is not None else float(nearest.iloc[0])
        above = [] if keeps is None else [target for target in bad if target > keeps]
        found.append({**dict(zip(FORM, form, strict=True)), "keeps": keeps, "fails": fails, "also_fails": above})
    return pd.DataFrame(found)


def markdown(rows: pd.DataFrame, notes: Sequence[str] = ()) -> str:
    """Write the rows of ``with_goal`` as two tables per study, with what the columns mean and notes."""
    blocks = ["# The smallest density that keeps up with dense", EXPLAINED]
    for (model, dataset, world_size, epochs), own in rows.groupby(STUDY):
        metric = metric_of(own["metric"])
        title = f"## {human(str(model))} on {human(str(dataset))}, {world_size} workers, {_epochs(epochs)}"
        blocks += [title, _smallest_table(own, metric), "All that was tried:", _all_table(own, metric)]
    return "\n\n".join([*blocks, *notes]) + "\n"


def _epochs(count: object) -> str:
    return "one epoch" if count == 1 else f"{count} epochs"


def write_keep_up(frames: Frames, out: Path, *, earlier: Earlier = NO_ROWS) -> list[Path]:
    """Write keep_up.md, keep_up.csv, keep_up_runs.csv and a figure for each study, and return the paths.

    Args:
        earlier: what is known of runs that are not at hand; its rows are written too.

    Returns:
        nothing without what to compare.
    """
    runs = earlier.with_runs(run_rows(frames))
    found = means(runs, earlier.means)
    rows = found if found.empty else with_goal(found)
    if rows.empty:
        return []
    origins = origins_of(runs)
    origin = [f"Runs, with {described(origins, runs['run'])}."] if origins else []
    text = markdown(rows, [*earlier_rows.notes(rows), *origin])
    written = [write_file(out / "keep_up.md", text), write_csv(found, out / "keep_up.csv")]  # methods of one target too
    written.append(write_csv(runs, out / "keep_up_runs.csv"))
    for (model, dataset, world_size, _), own in rows.groupby(STUDY):
        title = f"{human(str(model))} on {human(str(dataset))}, {world_size} workers"
        figure = draw_keep_up(own, metric_of(own["metric"]), title)
        written += save(figure, own, out / f"keep-up-{model}-{dataset}-n{world_size}")
    return written


def _smallest_table(rows: pd.DataFrame, metric: Metric) -> str:
    cells = []
    for _, form in smallest(rows).iterrows():
        own = rows[(rows["sparsifier"] == form["sparsifier"]) & (rows["variant"] == form["variant"])]
        own = own.set_index("density")
        cells.append(
            [label(form["sparsifier"], form["variant"]), *_kept(own, form, metric), _failed(own, form, metric)]
        )
    head = ["method", "keeps up at", "n", metric.column, "density", "sent", "of dense", "fails at"]
    return markdown_table(head, cells)


def _kept(own: pd.DataFrame, form: pd.Series, metric: Metric) -> list[str]:
    if pd.isna(form["keeps"]):
        return ["none tried", "", "", "", "", ""]
    also = f" (not at {', '.join(f'{target:g}' for target in form['also_fails'])})" if form["also_fails"] else ""
    row = own.loc[form["keeps"]]
    return [f"{form['keeps']:g}{also}", f"{row['num_seeds']}{earlier_rows.mark(row)}", _score(row, metric), *_sent(row)]


def _failed(own: pd.DataFrame, form: pd.Series, metric: Metric) -> str:
    if pd.isna(form["fails"]):
        return "none tried"
    row = own.loc[form["fails"]]
    return f"{form['fails']:g}: {metric.format(row['to_dense'])} (n = {row['num_seeds']})"


def _all_table(rows: pd.DataFrame, metric: Metric) -> str:
    ordered = rows.sort_values("total_bytes", ascending=False)
    cells = [
        [
            label(row["sparsifier"], row["variant"]),
            "-" if row["sparsifier"] == "dense" else f"{row['density']:g}",
            f"{row['num_seeds']}{earlier_rows.mark(row)}",
            _score(row, metric),
            metric.format(row["to_dense"]),
            *_sent(row),
            "yes" if row["keeps_up"] else "no",
        ]
        for _, row in ordered.iterrows()
    ]
    head = ["method", "target", "n", metric.column, "to dense", "density", "sent", "of dense", "keeps up"]
    return markdown_table(head, cells)


def _score(row: pd.Series, metric: Metric) -> str:
    spread = f" ± {metric.format(row['half_range'])}" if row["num_seeds"] > 1 else ""
    return f"{metric.format(row['value'])}{spread}"


def _sent(row: pd.Series) -> list[str]:
    return [f"{row['measured_density']:.3g}", human_bytes(row["total_bytes"]), f"{100 * row['of_dense']:.3g} %"]
