"""The table of runs, from run folders or published studies: one row per run with its settings and curve."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.config import ROOT
from experiments.config.errors import UserError, one_line
from experiments.config.identity import is_neutral
from experiments.reports.frames import Frames
from experiments.reports.provenance import ORIGIN, UNKNOWN
from experiments.reports.run_configs import Config
from experiments.reports.times import stage_times
from experiments.runs.files import write_csv

Curve = list[tuple[float, ...]]
FOLDER = ROOT / "results" / "published" / "runs"
SCHEMA = 1
TRAINING = ["model", "dataset", "world_size", "epochs"]  # a method is set beside dense in the same training
FORM = ["density", "sparsifier", "form", "rate"]  # runs of one training that agree in these differ in the seed alone
POINT = ["epochs_done", "step", "value", "total_bytes", "num_collectives"]  # of a curve, at each evaluation
STEP_MEANS = ["target_density", "density_error", "build_up", "imbalance"]
STEP_TIMES = ["step_compute_s", "select_s", "exchange_s", "rest_s", "total_s", "step_1gbit_s", "step_100mbit_s"]
OPTIONAL = ["parameters", *STEP_MEANS, *STEP_TIMES]  # a file without any value of one has no such column
NUMBERS = ["seed", "num_seeds", "measured_density", "low", "high", "compute_s", "at_100mbit_s", "at_1gbit_s", *OPTIONAL]
COLUMNS = [
    *("run", "kind", "studies", *TRAINING, *FORM, "seed", "num_seeds", "metric", "measured_density", "low", "high"),
    *("reached", "compute_s", "at_100mbit_s", "at_1gbit_s", *OPTIONAL),
    *(*ORIGIN, "manifest", "schema", "config", "curve"),
]
"""Columns of the table.

kind: ``run``, or ``mean``: what is known of several runs of which no record is left, with ``low`` and ``high``, the
ends of their range; ``reached``, for 90, 95 and 99 % of dense's end the share, how many of them came there, and the
means of their bytes and epochs; and the seconds of the whole run on links. studies: NAME or NAME/PART of conf/sweep.
form: in what it differs from the usual settings of its study. measured_density: a mean over steps. compute_s:
seconds in which a worker computes for one batch, a median. parameters: of the model. STEP_MEANS: means over applied
steps. STEP_TIMES: seconds of a step and its stages, medians, and the same step on slower links. config: its settings
as JSON, without those that change no number. curve: POINT at each evaluation, as tuples; in a file with commas
within and semicolons between, where what is not known is empty.
"""


def read(folder: Path = FOLDER) -> pd.DataFrame:
    """Return all rows of a folder. Raises: UserError: it has none, or a file is no such table."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise UserError(f"{folder} has no table of runs")
    return pd.concat([_read(path) for path in paths], ignore_index=True)


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per evaluation: the columns of its run, and POINT as numbers."""
    found = rows.explode("curve", ignore_index=True)
    return pd.concat([found, pd.DataFrame([*found.pop("curve")], columns=POINT, dtype=float)], axis=1)


def configs(rows: pd.DataFrame) -> list[Config]:
    """Return the configuration of each row, flat; empty where it is not known."""
    return [json.loads(text) if text else {} for text in rows["config"]]


def rows_of(frames: Frames, forms: Mapping[str, str], *, study: str = "", metric: str = "") -> pd.DataFrame:
    """Return a row per run of some run folders.

    Args:
        forms: in what each run differs from the usual settings; only these runs are taken.
        study: that they belong to.
        metric: the column of ``epochs`` that stands for them; by default the first that was measured.
    """
    facts = pd.concat([frames.runs.set_index("run"), _step_means(frames.steps), _step_times(frames.steps)], axis=1)
    steps, ends = (dict(list(rows.groupby("run"))) for rows in (frames.steps, frames.epochs))
    settings = [frames.settings[run] for run in forms]
    metrics = {run: metric or str(ends[run]["metric"].iloc[0]) for run in forms}
    rows = facts.loc[[*forms]].rename_axis("run").reset_index()
    columns: dict[str, Any] = {
        "kind": "run",
        "studies": study,
        "form": list(forms.values()),
        "rate": [config.get("lr") for config in settings],
        "num_seeds": 1,
        "metric": list(metrics.values()),
        "reached": "",
        "compute_s": [_compute_s(steps[run], config) for run, config in zip(forms, settings, strict=True)],
        "manifest": rows["manifest"].str[:16],
        "schema": SCHEMA,
        "config": list(map(_as_json, settings)),
        "curve": [_curve(steps[run], ends[run], chosen) for run, chosen in metrics.items()],
    }
    return rows.assign(**columns).reindex(columns=COLUMNS).astype(dict.fromkeys(NUMBERS, float))


def add(new: pd.DataFrame, folder: Path = FOLDER) -> list[Path]:
    """Add runs to the files of their studies, in place of rows of the same name; return the files that changed."""
    written = []
    for study, own in new.groupby(new["studies"].str.extract(r"^([^/ ]*)", expand=False)):
        path = folder / f"{study}.csv"
        before = _read(path) if path.exists() else own.iloc[:0]
        after = pd.concat([before[~before["run"].isin(own["run"])], own]).sort_values(["kind", "run"])
        after = after.assign(curve=after["curve"].map(_curve_in_words))
        known = [column for column in COLUMNS if column not in OPTIONAL or after[column].notna().any()]
        written.append(write_csv(after[known], path))
    return written


def of_known_origin(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the runs whose origin is known."""
    return rows[(rows["kind"] == "run") & (rows["code"] != UNKNOWN)]


def _read(path: Path) -> pd.DataFrame:
    texts = [column for column in COLUMNS if column not in {*NUMBERS, "density", "rate", "world_size", "epochs"}]
    empty = {column: [""] for column in [*NUMBERS, "rate"]}
    try:
        rows = pd.read_csv(path, dtype=dict.fromkeys(texts, str), keep_default_na=False, na_values=empty)
        missing = [column for column in COLUMNS if column not in rows and column not in OPTIONAL]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        if set(rows["schema"]) - {str(SCHEMA)}:
            raise ValueError(f"its schema is {', '.join(sorted(set(rows['schema'])))}, not {SCHEMA}")
        rows = rows.reindex(columns=COLUMNS).assign(curve=rows["curve"].map(_curve_of_words))
        points(rows), configs(rows)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, pd.errors.ParserError) as error:
        raise UserError(f"{path} is not a table of runs: {one_line(error)}") from None
    return rows


def _as_json(config: Config) -> str:
    own = {key: value for key, value in config.items() if not is_neutral(key)}
    return json.dumps(own, sort_keys=True, separators=(",", ":"), default=str)


def _compute_s(steps: pd.DataFrame, config: Config) -> float:
    """Return the seconds of one worker's batch. Simulated workers compute in turn, so that each took its share."""
    workers = int(str(config["cluster.world_size"])) if config.get("cluster.name") == "simulated" else 1
    return float(steps["compute_s"].median()) / (workers * int(str(config.get("accumulate", 1))))


def _step_means(steps: pd.DataFrame) -> pd.DataFrame:
    means = steps[~steps["skipped"]].groupby("run")[["density", *STEP_MEANS]].mean()
    return means.rename(columns={"density": "measured_density"})


def _step_times(steps: pd.DataFrame) -> pd.DataFrame:
    times = stage_times(steps) / 1000
    names = [str(name).replace("at_", "step_").replace("_ms", "_s") for name in times]
    return times.set_axis(names, axis=1).rename(columns={"compute_s": "step_compute_s"})[STEP_TIMES]


def _curve(steps: pd.DataFrame, ends: pd.DataFrame, metric: str) -> Curve:
    """Return POINT at each evaluation: at the ends of epochs, and within them where they were asked for."""
    until = steps[["bytes_sent", "num_collectives"]].cumsum().set_axis(["total_bytes", "num_collectives"], axis=1)
    until = until.assign(step=steps["step"] + 1)
    within = steps.reindex(columns=["step", metric]).dropna().assign(step=lambda rows: rows["step"] + 1)
    found = pd.concat([ends[["epoch", "step", metric]], within]).drop_duplicates("step").sort_values("step")
    found = pd.merge_asof(found.astype({"step": float}), until.astype({"step": float}), on="step")
    found = found.assign(epochs_done=found["epoch"] + 1, value=found[metric])
    return list(found[POINT].astype(float).itertuples(index=False, name=None))


def _curve_in_words(curve: Curve) -> str:
    return ";".join(",".join("" if math.isnan(value) else f"{value:.10g}" for value in point) for point in curve)


def _curve_of_words(text: str) -> Curve:
    return [tuple(float(value or "nan") for value in point.split(",")) for point in text.split(";")]
