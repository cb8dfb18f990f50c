"""Finished runs as one row each, small enough to be committed: what they reached and had sent after every epoch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.config.errors import UserError, one_line
from experiments.config.identity import identity
from experiments.reports.figure_numbers import with_total_bytes
from experiments.reports.frames import METHOD, Frames, studies_of
from experiments.reports.provenance import UNKNOWN, Origin, unlike
from experiments.reports.run_configs import EXPERIMENT

ORIGIN = {  # column -> what an origin calls it
    "code": "code revisions",
    "machine": "machines",
    "torch": "versions of torch",
    "runs_at_once": "runs at once",
}
TEXTS = ("run", "variant", "metric", "settings", "manifest", "curve", *ORIGIN)
POINT = ["epochs_done", "value", "total_bytes"]  # of a curve
STUDY = [
    *EXPERIMENT[:3],
    "epochs",
]  # runs of another length have another schedule of rates, and a baseline of their own
SAME = [*STUDY, "density", *METHOD]  # runs with these are repetitions, if their settings are equal


def run_rows(frames: Frames) -> pd.DataFrame:
    """Return a row per run: run, SAME, seed, metric, measured_density, settings, manifest, columns of ORIGIN, curve.

    ``settings`` is a digest of all settings but the seed; ``curve`` has "epochs value bytes" of every evaluation, with
    semicolons between them: epochs done, the measure's value, and what rank 0 had sent until then.
    """
    steps = frames.steps[~frames.steps["skipped"]]
    density = steps.groupby("run")["density"].mean()
    runs = frames.runs.set_index("run", drop=False).reindex(columns=["run", *SAME, "seed"])
    rows = []
    epochs = with_total_bytes(frames)
    for name, own in epochs[epochs["run"].isin(runs.index)].groupby("run"):
        metric, origin = own["metric"].iloc[0], frames.origins.get(str(name), {})
        found = runs.loc[name].to_dict() | {
            "variant": _without_length(own["variant"].iloc[0]),
            "metric": metric,
            "measured_density": density.get(name),
            "settings": _digest(frames.settings.get(str(name))),
            "manifest": frames.manifests.get(str(name), "")[:16],
        }
        found |= {column: origin.get(key, UNKNOWN) for column, key in ORIGIN.items()}
        done = zip(own["epoch"] + 1, own[metric], own["total_bytes"], strict=True)
        rows.append(found | {"curve": ";".join(f"{e:g} {value:.10g} {sent:.12g}" for e, value, sent in done)})
    columns = ["run", *SAME, "seed", "metric", "measured_density", "settings", "manifest", *ORIGIN, "curve"]
    return pd.DataFrame(rows, columns=columns).sort_values([*SAME, "run"], ignore_index=True)


def curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per evaluation of rows of ``run_rows``: their columns, and epochs_done, value and total_bytes."""
    points = rows.assign(point=rows["curve"].str.split(";")).explode("point", ignore_index=True)
    numbers = points["point"].str.split(" ", expand=True).astype(float).set_axis(POINT, axis=1)
    return pd.concat([points.drop(columns=["curve", "point"]), numbers], axis=1)


def read_run_rows(path: Path, name: str = "reached_runs.csv", same: Sequence[str] = SAME) -> pd.DataFrame:
    """Read what ``run_rows`` gave, from a CSV. Raises: UserError where it is none.

    Args:
        name: what such a file is called, for errors.
        same: the columns that its repetitions share, which it must have too.
    """
    try:
        rows = pd.read_csv(path, dtype=dict.fromkeys(TEXTS, str), keep_default_na=False, na_values={"seed": [""]})
        curves(rows)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, ValueError, pd.errors.ParserError) as error:
        raise UserError(f"{path} is no table of runs: {one_line(error)}; give a {name}") from None
    missing = [key for key in [*SAME, *same, "run", *TEXTS, "measured_density"] if key not in rows]
    if missing:
        raise UserError(f"{path} is no table of runs, it has no {missing[0]}; give a {name}")
    return rows


def joined(earlier: pd.DataFrame, own: pd.DataFrame, same: Sequence[str] = SAME) -> pd.DataFrame:
    """Return both, of a run that is in both the own row.

    Args:
        same: the columns that repetitions share.

    Raises:
        UserError: runs that would be taken as repetitions have not the same settings.
    """
    if own.empty:
        return earlier
    rows = pd.concat([own, earlier[~earlier["run"].isin(own["run"])]], ignore_index=True)
    for _, own_rows in rows[rows["settings"] != ""].groupby(list(same)):
        if own_rows["settings"].nunique() > 1:
            runs = own_rows.drop_duplicates("settings")["run"].iloc[:2]
            raise UserError(
                f"{' and '.join(runs)} differ in more than the seed, and in nothing that the table names: "
                "select others with KEY=VALUE, or leave --earlier-runs out"
            )
    return rows.sort_values([*same, "run"], ignore_index=True)


def origins_of(rows: pd.DataFrame) -> dict[str, Origin]:
    """Return where the runs of such rows come from, for those of which it is known."""
    known = rows[rows["code"] != UNKNOWN]
    return {str(row["run"]): {key: str(row[column]) for column, key in ORIGIN.items()} for _, row in known.iterrows()}


def notes(rows: pd.DataFrame) -> list[str]:
    """Return a line for each study and each thing in which the origins of its runs differ."""
    return unlike(studies_of(rows), origins_of(rows))


def _digest(config: Mapping[str, object] | None) -> str:
    if config is None:
        return ""
    settings = {key: value for key, value in identity(config).items() if key != "seed"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _without_length(variant: str) -> str:
    """Return what a variant says beside the number of epochs, which is the study's."""
    return ", ".join(part for part in variant.split(", ") if not part.startswith("epochs="))
