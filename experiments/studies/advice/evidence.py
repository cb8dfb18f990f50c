"""What finished trainings show: after how many epochs each method came to a share of dense's end, at which density."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.config.errors import UserError, as_user_error, check_choice
from experiments.reports.forms import forms
from experiments.reports.measures import metric_of
from experiments.reports.names import human
from experiments.reports.pages import load_page
from experiments.reports.table import TRAINING
from experiments.reports.table import read as read_runs

LEVELS = (90, 95, 99)  # percent of dense's end
NEEDED = [*TRAINING, "density", "sparsifier", "form", "num_seeds", "metric", "to_dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The runs of one task: as long as the longest, of the number of workers of which most forms are known.

    Attributes:
        words: which training they are of.
        level: percent of dense's end.
        runs: a row for dense, which is the first, and for each method at each density: method, variant, density,
            num_seeds, num_there (seeds that came to the level), epochs_there (a mean over them, NaN where not every
            one did) and gap (the distance of its own end to dense's, positive where better, in words).
    """

    words: str
    level: int
    runs: pd.DataFrame


def load_evidence(path: Path | None, level: int, task: str | None = None) -> Evidence:
    """Return what a summary.csv of `figures` says of one task, MODEL-DATASET; of the published runs without a path.

    Without a task it is the one of which most methods are known. ``level`` is percent of dense's end, of LEVELS.

    Raises:
        UserError: no such file or task, a table of another kind, or a task whose dense runs are missing.
    """
    frame = _read(path, level) if path else forms(load_page("long").runs(read_runs()))
    names = frame["model"].astype(str) + "-" + frame["dataset"].astype(str)
    task = str(names.value_counts().index[0]) if task is None else task
    check_choice("--task", sorted(set(names)), task)
    with as_user_error(TypeError, before=f"{path or 'the published runs'}, {task}: "):
        return _evidence(frame[names == task], level)


def _evidence(rows: pd.DataFrame, level: int) -> Evidence:
    longest = rows[rows["epochs"] == rows["epochs"].max()]
    own = longest[longest["world_size"] == longest["world_size"].mode()[0]]
    is_dense = own["sparsifier"] == "dense"
    if not is_dense.any():
        raise ValueError("no dense runs to compare with")
    names = {"sparsifier": "method", "form": "variant", f"num_{level}": "num_there", f"epochs_{level}": "epochs_there"}
    numbers = {"num_seeds": int, "num_there": int, "density": float, "epochs_there": float, "to_dense": float}
    named = pd.concat([own[is_dense].nlargest(1, "to_dense"), own[~is_dense]]).rename(columns=names)
    named = named.astype({**numbers, "method": str, "variant": str})
    named["epochs_there"] = named["epochs_there"].where(named["num_there"] == named["num_seeds"])
    named["gap"] = [_gap(row) for _, row in named.iterrows()]
    first = own.iloc[0]
    task = f"{human(str(first['model']))} on {human(str(first['dataset']))}"
    words = f"{task}, {int(first['world_size'])} workers, {int(first['epochs'])} epochs"
    columns = ["method", "variant", "density", "num_seeds", "num_there", "epochs_there", "gap"]
    return Evidence(words=words, level=level, runs=named[columns].reset_index(drop=True))


def _gap(row: pd.Series) -> str:
    metric = metric_of([str(row["metric"])])
    gap = metric.format(row["to_dense"])
    return f"{gap if gap.startswith('-') else f'+{gap}'} {metric.column}"


def _read(path: Path, level: int) -> pd.DataFrame:
    with as_user_error(OSError, before=f"{path}: "):
        frame = pd.read_csv(path, dtype={"form": str}, keep_default_na=False, na_values=[""])
    missing = [key for key in [*NEEDED, f"num_{level}", f"epochs_{level}"] if key not in frame]
    if missing:
        raise UserError(f"{path} is no summary.csv of experiments.figures: it has no {', '.join(missing)}")
    beside_dense = frame[frame["to_dense"].notna()]
    if beside_dense.empty:
        raise UserError(f"{path} has no row beside dense runs of the same training")
    return beside_dense.assign(form=beside_dense["form"].astype(object).fillna(""))
