"""What finished trainings show: after how many epochs each method came to a share of dense's end, at which density."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.config.errors import UserError, one_line, suggestion
from experiments.reports.forms import forms
from experiments.reports.measures import metric_of
from experiments.reports.pages import load_page
from experiments.reports.table import read as read_runs

LEVELS = (90, 95, 99)  # percent of dense's end
TASK = ["model", "dataset", "world_size", "epochs"]
NEEDED = [*TASK, "density", "sparsifier", "form", "num_seeds", "metric", "to_dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How long a method trained until all its seeds had come to a share of dense's end.

    Attributes:
        density: that was asked for.
        epochs: mean over seeds; None where not every seed came there.
        num_there, num_seeds: seeds that did, and all.
        to_dense: distance of the method's own end to dense's, positive where better, in words with its unit.
    """

    method: str
    variant: str
    density: float
    epochs: float | None
    num_there: int
    num_seeds: int
    to_dense: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The runs of one task, as long as the longest that are known: dense and the other methods."""

    model: str
    dataset: str
    world_size: int
    epochs: int
    level: int
    dense: Reached
    methods: Sequence[Reached]


def load_evidence(path: Path | None, level: int, task: str | None = None) -> Evidence:
    """Return what a table of `figures` (summary.csv) says of one task.

    Args:
        path: of the table; None takes the published runs of page ``long``.
        level: percent of dense's end, of LEVELS.
        task: MODEL-DATASET; None takes the one of which most methods are known.

    Raises:
        UserError: no such file or task, a table of another kind, or a task whose dense runs are missing.
    """
    frame = _read(path, level) if path else forms(load_page("long").runs(read_runs()))
    names = frame["model"].astype(str) + "-" + frame["dataset"].astype(str)
    if task is None:
        task = str(names.value_counts().index[0])
    if task not in set(names):
        known = sorted(set(names))
        raise UserError(f"--task must be one of {', '.join(known)}, got '{task}'{suggestion(task, known)}")
    try:
        return _evidence(frame[names == task], level)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path or 'the published runs'}, {task}: {one_line(error)}") from None


def _evidence(rows: pd.DataFrame, level: int) -> Evidence:
    own = rows[rows["epochs"] == rows["epochs"].max()]
    dense = own[own["sparsifier"] == "dense"]
    if dense.empty:
        raise ValueError("no dense runs to compare with")
    first = own.iloc[0]
    return Evidence(
        model=str(first["model"]),
        dataset=str(first["dataset"]),
        world_size=int(first["world_size"]),
        epochs=int(first["epochs"]),
        level=level,
        dense=_reached(dense.iloc[0], level),
        methods=[_reached(row, level) for _, row in own[own["sparsifier"] != "dense"].iterrows()],
    )


def _read(path: Path, level: int) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, dtype={"form": str}, keep_default_na=False, na_values=[""])
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, pd.errors.ParserError) as error:
        raise UserError(f"{path} is no table of numbers: {one_line(error)}") from None
    missing = [key for key in [*NEEDED, f"num_{level}", f"epochs_{level}"] if key not in frame]
    if missing:
        raise UserError(f"{path} is no summary.csv of experiments.figures: it has no {', '.join(missing)}")
    beside_dense = frame[frame["to_dense"].notna()]
    if beside_dense.empty:
        raise UserError(f"{path} has no row beside dense runs of the same training")
    return beside_dense.assign(form=beside_dense["form"].astype(object).fillna(""))


def _reached(row: pd.Series, level: int) -> Reached:
    there, seeds = int(row[f"num_{level}"]), int(row["num_seeds"])
    metric = metric_of([str(row["metric"])])
    gap = metric.format(float(row["to_dense"]))
    return Reached(
        method=str(row["sparsifier"]),
        variant=str(row["form"]),
        density=float(row["density"]),
        epochs=float(row[f"epochs_{level}"]) if there == seeds else None,
        num_there=there,
        num_seeds=seeds,
        to_dense=f"{gap if gap.startswith('-') else f'+{gap}'} {metric.column}",
    )
