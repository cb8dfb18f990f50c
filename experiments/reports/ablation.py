"""The forms of an ablation beside dense training: what each changes, what it reached, and what it sent."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.config.units import human_bytes
from experiments.reports.ablation_figure import draw_forms
from experiments.reports.csv_files import write_csv
from experiments.reports.figure_numbers import with_total_bytes
from experiments.reports.figure_parts import save
from experiments.reports.forms import changes, in_words
from experiments.reports.frames import Frames
from experiments.reports.markdown import table as markdown_table
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import human, label
from experiments.reports.output import write_file
from experiments.reports.provenance import described
from experiments.reports.run_configs import EXPERIMENT

STUDY = EXPERIMENT[:3]
FORM = ["sparsifier", "change", "rate"]
RATE = "lr"  # the setting that is a column of its own

EXPLAINED = """\
Each row is a form: a method, in what it differs from the study's usual settings, and its rate. Numbers are means over n
seeds at the last epoch, ± half the range; *to dense* is the distance to the dense runs that exchange gradients at the
best of their rates, where more is better. *Density* is the share of elements that an update touches, *sent* what rank 0
sent in the whole run, *of dense* its share of what dense sends. The best come first. With one seed nothing is said of
the spread. A form that is missing, or has fewer seeds than others, is not finished."""

TUNED = """\
The same with the best rate of each form, of as many as it had (*trials*), on the same seeds and test set: what was
chosen by luck is in these numbers."""


def forms(frames: Frames) -> pd.DataFrame:
    """Return a row per form: STUDY, FORM, num_seeds, the measure's key as ``metric``.

    Further columns: value, low and high over seeds, to_dense (positive where better), measured_density,
    total_bytes, of_dense. The best come first. Empty where no dense run exchanges gradients.
    """
    changed: dict[str, dict[str, str]] = {}
    for _, own in frames.runs.groupby(STUDY):
        changed |= changes({run: frames.settings[run] for run in own["run"]})
    ends = with_total_bytes(frames).groupby("run").tail(1).set_index("run")
    steps = frames.steps[~frames.steps["skipped"]]
    density = steps.groupby("run")["density"].mean()
    known = [run for run in frames.runs["run"] if run in ends.index]
    runs = frames.runs.set_index("run").loc[known, [*STUDY, "sparsifier"]].join(ends[["metric", "total_bytes"]])
    runs = runs.assign(
        change=[in_words(changed[run], without=[RATE]) for run in known],
        rate=[float(str(frames.settings[run][RATE])) for run in known],
        value=[ends.loc[run, ends.loc[run, "metric"]] for run in known],
        measured_density=density.reindex(known),
    )
    rows = runs.groupby([*STUDY, *FORM, "metric"]).agg(
        num_seeds=("value", "size"),
        value=("value", "mean"),
        low=("value", "min"),
        high=("value", "max"),
        measured_density=("measured_density", "mean"),
        total_bytes=("total_bytes", "mean"),
    )
    return _beside_dense(rows.reset_index())


def _beside_dense(rows: pd.DataFrame) -> pd.DataFrame:
    parts = []
    for _, own in rows.groupby(STUDY):
        sign = 1 if metric_of(own["metric"]).higher_is_better else -1
        dense = own[(own["sparsifier"] == "dense") & (own["change"] == "")]
        if dense.empty:
            continue
        best = dense.assign(gain=sign * dense["value"]).nlargest(1, "gain").iloc[0]
        own = own.assign(
            to_dense=sign * (own["value"] - best["value"]) + 0.0, of_dense=own["total_bytes"] / best["total_bytes"]
        )
        parts.append(own.sort_values("to_dense", ascending=False))
    return pd.concat(parts, ignore_index=True) if parts else rows.iloc[:0]


def tuned(rows: pd.DataFrame) -> pd.DataFrame:
    """Return, of the forms of one study that were tried at several rates, the row of the best, with ``trials``."""
    by_form = rows.groupby(["sparsifier", "change"])
    trials = by_form["value"].transform("size")
    several = rows.assign(trials=trials)[trials > 1]
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


def write_ablation(frames: Frames, out: Path) -> list[Path]:
    """Write ablation.md, ablation.csv and a figure for each study; return the paths, none without a dense run."""
    rows = forms(frames)
    if rows.empty:
        return []
    origin = [f"Runs, with {described(frames.origins, frames.runs['run'])}."] if frames.origins else []
    path = write_file(out / "ablation.md", markdown(rows, [*origin, *frames.notes()]))
    written = [path, write_csv(rows, out / "ablation.csv")]
    for (model, dataset, world_size), own in rows.groupby(STUDY):
        title = f"{human(str(model))} on {human(str(dataset))}, {world_size} workers"
        figure = draw_forms(own, metric_of(own["metric"]), title)
        written += save(figure, own, out / f"ablation-{model}-{dataset}-n{world_size}")
    return written


def _table(rows: pd.DataFrame, metric: Metric) -> str:
    has_trials = "trials" in rows
    head = [
        "form",
        "rate",
        "n",
        metric.column,
        "to dense",
        "density",
        "sent",
        "of dense",
        *(["trials"] if has_trials else []),
    ]
    return markdown_table(head, [_cells(row, metric) for _, row in rows.iterrows()])


def _cells(row: pd.Series, metric: Metric) -> list[str]:
    spread = f" ± {metric.format((row['high'] - row['low']) / 2)}" if row["num_seeds"] > 1 else ""
    gap = metric.format(row["to_dense"])
    return [
        label(row["sparsifier"], row["change"]),
        f"{row['rate']:g}",
        f"{row['num_seeds']}",
        f"{metric.format(row['value'])}{spread}",
        gap if gap.startswith("-") else f"+{gap}",
        f"{row['measured_density']:.3g}",
        human_bytes(row["total_bytes"]),
        f"{100 * row['of_dense']:.3g} %",
        *([f"{row['trials']}"] if "trials" in row else []),
    ]
