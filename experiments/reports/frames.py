"""Runs as tidy tables, the only input of figures and tables (docs/run_folders.md has the schema).

They are read from run folders here, and from W&B in tracking/sources.py.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from experiments.config.errors import UserError, one_line
from experiments.reports.finished_runs import FinishedRun, in_folders, refuse_damaged
from experiments.reports.measures import METRICS, metric_of
from experiments.reports.provenance import origin_of
from experiments.reports.run_configs import Config, Selection, run_frame, selected_configs

STAGES = ("compute", "select", "exchange", "rest")
STEP_NUMBERS = (
    *("step", "epoch", "loss", "lr", "target_density", "density", "local_density", "density_error", "build_up"),
    *("imbalance", "threshold", "relative_error", "forgotten", "residual_norm"),
    *("round", "fragment", "moved_norm", "update_norm", "cosine", "drift"),
    *("bytes_sent", "counts_bytes", "indices_bytes", "values_bytes", "num_collectives"),
    *("compute_s", "forward_s", "select_s", "exchange_s", "rest_s", "hidden_s", "step_s", "wall_s", "time_s"),
)
EPOCH_NUMBERS = (
    *("epoch", "step", "time_s", "train_loss", "test_loss", "num_samples"),
    *(metric.key for metric in METRICS),
)
NUMBERS = {"steps": STEP_NUMBERS, "epochs": EPOCH_NUMBERS}
METHOD = ["sparsifier", "variant"]  # what one line of a figure stands for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frames:
    """Finished runs of one source; ``steps`` and ``epochs`` carry the columns of ``runs``.

    ``runs`` has one row per run: run, the keys of COLUMNS, accumulate, parameters, and ``variant``, empty unless
    runs of one experiment differ in more than the seed; it then names that difference, ``lr=0.1``. The density of
    a dense run is 1, whatever its configuration says. ``epochs`` has a column for every one of METRICS, NaN where a run
    does not measure it, and ``metric``, the key of the one that stands for the run.

    It also has the columns of ORIGIN, see provenance.py, and ``manifest``, a digest of each run's manifest, empty where
    there is none. ``settings`` has the keys of each configuration.
    """

    runs: pd.DataFrame
    steps: pd.DataFrame
    epochs: pd.DataFrame
    settings: Mapping[str, Config]

    def of(self, runs: pd.DataFrame) -> "Frames":
        """Return some of the runs, and their records."""
        steps, epochs = (rows[rows["run"].isin(runs["run"])] for rows in (self.steps, self.epochs))
        return replace(self, runs=runs, steps=steps, epochs=epochs)

    def skipped(self) -> list[str]:
        """Return a line for each run that skipped all steps."""
        lost = self.steps.groupby("run")["skipped"].all()
        return [f"no step was applied, all were skipped: {run}" for run in lost.index[lost]]


def load(root: Path | str | Sequence[Path], selection: Selection | None = None) -> Frames:
    """Read every finished run under ``root`` whose configuration fits ``selection``.

    Args:
        root: a folder of run folders, or several; of a run that is in two of them the first is read.

    Raises:
        UserError: a folder without a finished run, a selection that fits none, a damaged run.
    """
    found: dict[str, FinishedRun] = {}
    for each in [root] if isinstance(root, Path | str) else root:
        found = in_folders(Path(each)) | found
    return tidy(found, selection)


def tidy(found: Mapping[str, FinishedRun], selection: Selection | None = None) -> Frames:
    """Read the runs, by their names, whose configuration fits ``selection``; one that is there twice is left out.

    A number of a configuration that is whole is an integer, whether 1 or 1.0 was written. The columns that are not
    known by name come last, in the order of the alphabet.

    Raises:
        UserError: a selection that fits none, or a damaged run.
    """
    configs = selected_configs(found, selection or {})
    table = run_frame(configs)
    refuse_damaged(found, table["run"])
    manifests = {run: found[run].manifest for run in table["run"]}
    table["parameters"] = [float(manifests[run].get("num_parameters", "nan")) for run in table["run"]]  # type: ignore[arg-type]
    steps, epochs = (_records(found, table, kind) for kind in NUMBERS)
    origins = pd.DataFrame([origin_of(manifest) for manifest in manifests.values()])
    texts = [json.dumps(manifest, sort_keys=True, default=str) if manifest else "" for manifest in manifests.values()]
    digests = [hashlib.sha256(text.encode()).hexdigest() if text else "" for text in texts]
    return Frames(
        runs=pd.concat([table, origins], axis=1).assign(manifest=digests),
        steps=steps.assign(skipped=steps["skipped"].eq(True) if "skipped" in steps else False),
        epochs=epochs,
        settings=configs,
    )


def _records(found: Mapping[str, FinishedRun], table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Rows of one kind of all runs, every known number as float, joined with the run table."""
    numbers = NUMBERS[kind]
    rows = pd.concat([_read(found[run], kind).assign(run=run) for run in table["run"]], ignore_index=True)
    rows = rows.reindex(columns=list(dict.fromkeys(["run", *numbers, *sorted(rows.columns)])))
    rows[list(numbers)] = rows[list(numbers)].astype(float)
    # A resumed run may have repeated steps after its last checkpoint: the later row is the one that counts.
    rows = rows.drop_duplicates(["run", numbers[0]], keep="last")
    own = table.drop(columns=["epochs", "accumulate"]).rename(columns={"density": "asked_density"})
    return rows.merge(own, on="run", validate="many_to_one").sort_values(["run", numbers[0]], ignore_index=True)


def _read(run: FinishedRun, kind: str) -> pd.DataFrame:
    frame = pd.DataFrame(run.rows(kind))
    if frame.empty:
        raise UserError(f"{run.place(kind)} has no rows; {run.remedy}")
    numbers = [key for key in NUMBERS[kind] if key in frame]
    try:
        frame[numbers] = frame[numbers].apply(pd.to_numeric).astype(float)
        for key in ("step", "epoch"):
            frame[key] = frame[key].astype(int)  # which NaN is not
        return frame.assign(metric=metric_of(frame.columns).key) if kind == "epochs" else frame
    except KeyError as error:
        raise UserError(f"{run.place(kind)} has rows without {error}; {run.remedy}") from None
    except (TypeError, ValueError, OverflowError, UserError) as error:
        raise UserError(f"{run.place(kind)}: {one_line(error)}; {run.remedy}") from None
