"""The forms of an ablation beside dense training: what each changes, what it reached, and what it sent."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from experiments.config.units import human_bytes
from experiments.reports import earlier_rows
from experiments.reports.ablation_figure import draw_forms
from experiments.reports.csv_files import write_csv
from experiments.reports.earlier_rows import Earlier, Table
from experiments.reports.figure_parts import save
from experiments.reports.forms import Config, changes, in_words
from experiments.reports.frames import Frames
from experiments.reports.markdown import table as markdown_table
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import human, label
from experiments.reports.output import write_file
from experiments.reports.provenance import described
from experiments.reports.run_configs import COLUMNS, EXPERIMENT
from experiments.reports.run_rows import curves, origins_of, run_rows
from experiments.reports.run_rows import notes as notes_of_runs

STUDY = EXPERIMENT[:3]
FORM = ["sparsifier", "change", "rate"]
BESIDE = ["to_dense", "of_dense"]  # what a row says of the dense runs
RATE = "lr"  # the setting that is a column of its own
TABLE = Table(name="ablation", same=[*STUDY, *FORM], more=["low", "high", "of_dense"])
NO_ROWS = Earlier(means=TABLE.empty())

EXPLAINED = """\
Each row is a form: a method, in what it differs from the study's usual settings, and its rate. Numbers are means over n
seeds at the last epoch, ± half the range; *to dense* is the distance to the dense runs that exchange gradients at the
best of their rates, where more is better. *Density* is the share of elements that an update touches, *sent* what rank 0
sent in the whole run, *of dense* its share of what dense sends. *Rates tried* are those of the form that are in the
table: one that had more of them had more luck. The best come first. With one seed nothing is said of the spread. A form
that is missing, or has fewer seeds than others, is not finished."""

TUNED = """\
The same with the best rate of each form that was tried at several, on the same seeds and test set: what was chosen by
luck is in these numbers."""


def form_rows(frames: Frames, plan: Iterable[Config] = ()) -> pd.DataFrame:
    """Return a row per run, as of ``run_rows``, with what its form changes and its rate in place of its variant.

    Args:
        plan: configurations of the study; see ``changes``.
    """
    planned, changed = list(plan), dict[str, dict[str, str]]()
    for study, own in frames.runs.groupby(STUDY):
        of_study = [config for config in planned if tuple(config[COLUMNS[key]] for key in STUDY) == study]
        changed |= changes({run: frames.settings[run] for run in own["run"]}, of_study)
    rows = run_rows(frames)
    return rows.assign(
        sparsifier=[str(frames.settings[run]["sparsifier.name"]) for run in rows["run"]],  # what differs is a change
        variant="",
        change=[in_words(changed[run], without=[RATE]) for run in rows["run"]],
        rate=[float(str(frames.settings[run][RATE])) for run in rows["run"]],
    )


def forms(runs: pd.DataFrame, earlier: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return a row per form: STUDY, FORM, num_seeds, the measure's key as ``metric``.

    Further columns: value, low and high over seeds, to_dense (positive where better), measured_density,
    total_bytes, of_dense, trials (the rates that the form was tried at), code, machine, is_earlier. The best come
    first. Empty where no dense run exchanges gradients.

    Args:
        runs: rows of ``form_rows``.
        earlier: what this function gave for runs that are not at hand; see ``earlier_rows.merged``.
    """
    old, parts = TABLE.empty() if earlier is None else earlier, []
    for study, own in curves(runs).groupby(STUDY):
        last = own.groupby("run").tail(1)
        kept = old[(old[STUDY] == [*study]).all(axis=1)]
        parts.append(_beside_dense(earlier_rows.merged(kept, own, _means(last), TABLE.same)))
    parts += [_beside_dense(own) for _, own in earlier_rows.elsewhere(old, runs, STUDY).groupby(STUDY)]
    return pd.concat([part for part in parts if not part.empty] or [TABLE.empty()], ignore_index=True)


def _means(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per form, given the last evaluation of each run."""
    grouped = runs.groupby([*TABLE.same, "metric"])
    rows = grouped.agg(
        num_seeds=("value", "size"),
        value=("value", "mean"),
        low=("value", "min"),
        high=("value", "max"),
        measured_density=("measured_density", "mean"),
        total_bytes=("total_bytes", "mean"),
        code=("code", _distinct),
        machine=("machine", _distinct),
    )
    return rows.reset_index()


def _distinct(texts: pd.Series) -> str:
    return ", ".join(sorted(set(texts)))


def _beside_dense(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of one study with to_dense, of_dense and trials, the best first; none without a baseline."""
    sign = 1 if metric_of(rows["metric"]).higher_is_better else -1
    dense = rows[(rows["sparsifier"] == "dense") & (rows["change"] == "")]
    if dense.empty:
        return rows.iloc[:0]
    best = dense.assign(gain=sign * dense["value"]).nlargest(1, "gain").iloc[0]
    beside = rows.assign(
        to_dense=sign * (rows["value"] - best["value"]) + 0.0,
        of_dense=rows["total_bytes"] / best["total_bytes"],
        trials=rows.groupby(["sparsifier", "change"])["rate"].transform("nunique").astype(int),
    )
    # Numbers of an earlier table may be rounded: while the baseline is its own, what it says of that stays.
    if best["is_earlier"] and best["to_dense"] == 0:
        stay = rows["is_earlier"].astype(bool)
        beside.loc[stay, BESIDE] = rows.loc[stay, BESIDE].astype(float)
    return beside.sort_values("to_dense", ascending=False)


def tuned(rows: pd.DataFrame) -> pd.DataFrame:
    """Return, of the forms of one study that were tried at several rates, the row of the best."""
    several = rows[rows["trials"] > 1]
    return several.loc[several.groupby(["sparsifier", "change"])["to_dense"].idxmax()].sort_values(
        "to_dense", ascending=False
    )


def markdown(rows: pd.DataFrame, notes: Sequence[str] = ()) -> str:
    """Write the rows of ``forms`` as tables, with what the columns mean and notes."""
    blocks = ["# What brings MiCRO nearer to dense, one factor at a time", EXPLAINED]
    for (model, dataset, world_size), own in rows.groupby(STUDY):
        metric = metric_of(own["metric"])
        better = "" if metric.higher_is_better else " (less is better)"
        blocks.append(f"## {human(str(model))} on {human(str(dataset))}, {world_size} workers{better}")
        blocks.append(_table(own, metric))
        best = tuned(own)
        if not best.empty:
            blocks += [TUNED, _table(best, metric)]
    return "\n\n".join([*blocks, *notes]) + "\n"


def write_ablation(frames: Frames, out: Path, *, plan: Iterable[Config] = (), earlier: Earlier = NO_ROWS) -> list[Path]:
    """Write ablation.md, ablation.csv, ablation_runs.csv and a figure for each study, and return the paths.

    Args:
        plan: configurations of the study; see ``changes``.
        earlier: what is known of runs that are not at hand; its rows are written too.

    Returns:
        nothing where no study has a dense run.
    """
    runs = earlier.with_runs(form_rows(frames, plan), TABLE.same)
    rows = forms(runs, earlier.means)
    if rows.empty:
        return []
    origins = origins_of(runs)
    origin = [f"Runs, with {described(origins, runs['run'])}."] if origins else []
    path = write_file(
        out / "ablation.md",
        markdown(rows, [*earlier_rows.notes(rows), *origin, *notes_of_runs(runs), *frames.damage()]),
    )
    written = [path, write_csv(rows, out / "ablation.csv"), write_csv(runs, out / "ablation_runs.csv")]
    for (model, dataset, world_size), own in rows.groupby(STUDY):
        here = runs[(runs[STUDY] == [model, dataset, world_size]).all(axis=1)]
        title = f"{human(str(model))} on {human(str(dataset))}, {world_size} workers{_length(here)}"
        figure = draw_forms(own, metric_of(own["metric"]), title)
        written += save(figure, own, out / f"ablation-{model}-{dataset}-n{world_size}")
    return written


def _length(runs: pd.DataFrame) -> str:
    """Return what a title says of the runs' length: nothing where they differ in it."""
    lengths = runs["epochs"].unique()
    if len(lengths) != 1:
        return ""
    return ", 1 epoch" if lengths[0] == 1 else f", {lengths[0]} epochs"


def _table(rows: pd.DataFrame, metric: Metric) -> str:
    head = ["form", "rate", "rates tried", "n", metric.column, "to dense", "density", "sent", "of dense"]
    return markdown_table(head, [_cells(row, metric) for _, row in rows.iterrows()])


def _cells(row: pd.Series, metric: Metric) -> list[str]:
    spread = f" ± {metric.format((row['high'] - row['low']) / 2)}" if row["num_seeds"] > 1 else ""
    gap = metric.format(row["to_dense"])
    return [
        label(row["sparsifier"], row["change"]),
        f"{row['rate']:g}",
        f"{row['trials']}",
        f"{row['num_seeds']}{earlier_rows.mark(row)}",
        f"{metric.format(row['value'])}{spread}",
        gap if gap.startswith("-") else f"+{gap}",
        f"{row['measured_density']:.3g}",
        human_bytes(row["total_bytes"]),
        f"{100 * row['of_dense']:.3g} %",
    ]
