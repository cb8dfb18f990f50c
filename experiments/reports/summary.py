"""One row per experiment: what it reached, what it sent, where its time went."""

from pathlib import Path

import pandas as pd
from pandas.api.typing import DataFrameGroupBy

from experiments.reports.frames import STAGES, Frames, load
from experiments.reports.link_times import link_times
from experiments.reports.measures import METRICS
from experiments.reports.names import in_order
from experiments.reports.run_configs import EXPERIMENT

WARM_UP_STEPS = 10  # caches, allocators and connections settle; left out of times where a run is long enough
ROW = [*EXPERIMENT, "variant"]
SPREAD = ("", "_half_range", "_min", "_max")  # columns of a measure: its key with each of these


def summary(root: Path | str) -> pd.DataFrame:
    """Summarise every finished run under ``root``; columns as in ``summarise``. Raises: UserError when none is."""
    return summarise(load(root))


def summarise(frames: Frames) -> pd.DataFrame:
    """One row per model, dataset, world_size, density, sparsifier and variant; numbers are means over seeds.

    Columns: metric, the key of the measure that stands for the row; num_seeds; for every measure of the runs, such as
    accuracy, its value after the last epoch (shares as fractions) with accuracy_half_range, half the distance of the
    best and the worst seed, accuracy_min and accuracy_max; means over all applied steps of density, target_density,
    density_error, build_up, imbalance; bytes_sent per step and worker; compute_ms, select_ms, exchange_ms, rest_ms
    (see ``stage_times``) and total_ms, their sum; times of the same step on slower links (link_times.py). A measure of
    another task is NaN.
    """
    keys = measured(frames.epochs)
    ends = frames.epochs.groupby("run").tail(1).set_index("run")[["metric", *keys]]
    parts = [frames.runs.set_index("run")[ROW], ends, _traffic(frames), stage_times(frames.steps)]
    groups = pd.concat(parts, axis=1).groupby([*ROW, "metric"])
    table = spread(groups[keys]).join(groups.mean().drop(columns=keys))
    table.insert(0, "num_seeds", groups.size())
    rows = table.reset_index()
    order = {name: place for place, name in enumerate(in_order(rows["sparsifier"]))}
    rows = rows.assign(place=rows["sparsifier"].map(order), sparse=-rows["density"])  # dense, the baseline, first
    by = [*EXPERIMENT[:3], "sparse", "place", "variant"]
    return rows.sort_values(by, ignore_index=True).drop(columns=["place", "sparse"])


def measured(rows: pd.DataFrame) -> list[str]:
    """Return the keys of METRICS that rows of ``summarise``, or epochs, have values of or are named after."""
    named = set(rows["metric"])
    keys = [metric.key for metric in METRICS if metric.key in rows]
    return [key for key in keys if key in named or rows[key].notna().any()]


def of_study(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out of some rows of ``summarise`` the columns of measures that only other rows have."""
    others = {metric.key for metric in METRICS} - set(measured(rows))
    return rows.drop(columns=[f"{key}{end}" for key in others for end in SPREAD], errors="ignore")


def spread(scores: DataFrameGroupBy) -> pd.DataFrame:
    """Columns of SPREAD of each measure over the seeds of a group; NaN, not of fewer seeds, where one is not finite."""
    least, mean, most = scores.min(skipna=False), scores.mean(skipna=False), scores.max(skipna=False)
    parts = zip(SPREAD, (mean, (most - least) / 2, least, most), strict=True)
    table = pd.concat([part.add_suffix(end) for end, part in parts], axis=1)
    return table[[f"{key}{end}" for key in mean.columns for end in SPREAD]]


def stage_times(steps: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds per step of each run: of every stage the median over rounds, their sum, and on slower links.

    Of a round its mean step counts, so that its exchange is in it; without local steps each step is a round. Rounds in
    which a step was skipped do not count, nor do the first WARM_UP_STEPS (half of the rounds in a very short run).
    """
    numbered = steps.set_index([steps["run"], _rounds(steps)])
    rounds = numbered.groupby(level=[0, 1])
    sizes = rounds.size()
    whole = sizes[(sizes == sizes.groupby("run").transform("max")) & ~rounds["skipped"].any()]
    of_run = whole.groupby("run")
    warm = whole[of_run.cumcount() >= (-(-WARM_UP_STEPS // whole)).clip(upper=of_run.transform("size") // 2)]
    means = rounds[[f"{stage}_s" for stage in STAGES]].mean().loc[warm.index]
    times = means.groupby("run").median().fillna(0) * 1000
    times.columns = pd.Index([f"{stage}_ms" for stage in STAGES])
    times = times.assign(total_ms=times.sum(axis=1))
    counted = numbered[numbered.index.isin(warm.index)].reset_index(drop=True)
    return times.join(link_times(counted, times))


def _rounds(steps: pd.DataFrame) -> pd.Series:
    """Return the number of the round that each step is in: one ends where the first fragment's exchange does."""
    ends = steps["fragment"].eq(0)
    ends |= ~ends.groupby(steps["run"]).transform("any")
    return ends.groupby(steps["run"]).cumsum() - ends.astype(int)


def _traffic(frames: Frames) -> pd.DataFrame:
    columns = ["density", "target_density", "density_error", "build_up", "imbalance"]
    steps = frames.steps
    means = steps[~steps["skipped"]].groupby("run")[columns].mean().rename(columns={"density": "measured_density"})
    return means.assign(bytes_sent=steps.groupby("run")["bytes_sent"].mean())
