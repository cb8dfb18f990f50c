"""The numbers that figures of runs draw, from the frames of the runs."""

import pandas as pd

from experiments.reports.frames import METHOD, Frames
from experiments.reports.measures import Metric
from experiments.reports.stage_times import stage_times

RULES = ("published", "repaired", "agreed")
SIMULATED = "simulated"  # workers that take turns in one process: their steps are not as long as those of real ones
MAX_POINTS = 400  # of one line; more cannot be seen and makes the PDF heavy


def convergence_numbers(frames: Frames, metric: Metric) -> pd.DataFrame:
    """Per method and epoch: num_seeds, mean step, time_s and total_bytes, and the measure with its _min and _max.

    total_bytes is what a worker sent until then. A measure is NaN, not that of fewer seeds, where one is not finite.
    """
    by_epoch = with_total_bytes(frames).groupby([*METHOD, "epoch"])
    means = by_epoch[["step", "time_s", "total_bytes"]].mean()
    means.insert(0, "num_seeds", by_epoch.size())
    scores = by_epoch[metric.key]
    spread = {"": scores.mean(skipna=False), "_min": scores.min(skipna=False), "_max": scores.max(skipna=False)}
    return means.assign(**{f"{metric.key}{end}": values for end, values in spread.items()}).reset_index()


def density_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Per sparse method, seed and step: target_density, density and density_error, smoothed and thinned to be drawn.

    Steps within a round of local steps, which exchange nothing, have none.
    """
    sparse = steps[(steps["sparsifier"] != "dense") & ~steps["skipped"] & steps["density"].notna()]
    columns = [*METHOD, "seed", "step", "target_density", "density", "density_error"]
    return _drawable(sparse, columns[-2:])[columns].sort_values(columns[:4], ignore_index=True)


def time_numbers(frames: Frames) -> pd.DataFrame:
    """Per method: num_seeds and the mean over seeds of ``stage_times``; runs without an applied step have none."""
    times = frames.runs.set_index("run")[METHOD].join(stage_times(frames.steps), how="inner").groupby(METHOD)
    means = times.mean()
    means.insert(0, "num_seeds", times.size())
    return means.reset_index()


def residual_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Per method, seed and step: residual_norm, in the steps in which it was measured; thinned to be drawn."""
    measured = steps[steps["residual_norm"].notna()]
    keys = [*METHOD, "seed", "step"]
    return _thinned(measured)[[*keys, "residual_norm"]].sort_values(keys, ignore_index=True)


def throughput_numbers(frames: Frames) -> pd.DataFrame:
    """Per method, density and number of real workers: num_seeds, samples_per_s with its _min and _max, and efficiency.

    efficiency is samples_per_s per worker over that of the method's fewest workers. Simulated workers have no
    throughput. Empty unless runs with at least two numbers of workers are there.
    """
    times = stage_times(frames.steps)
    real = frames.runs[(frames.runs["cluster"] != SIMULATED) & frames.runs["run"].isin(times.index)].set_index("run")
    keys = [*METHOD, "asked_density"]
    columns = [*keys, "world_size", "num_seeds", *(f"samples_per_s{end}" for end in ("", "_min", "_max"))]
    if real["world_size"].nunique() < 2:
        return pd.DataFrame(columns=[*columns, "efficiency"])
    steps_per_s = 1000 / times["total_ms"]
    speeds = real.assign(samples_per_s=real["world_size"] * real["batch_size"] * real["accumulate"] * steps_per_s)
    by_size = speeds.groupby([*METHOD, "density", "world_size"])["samples_per_s"]
    rows = by_size.agg(["size", "mean", "min", "max"]).reset_index().set_axis(columns, axis=1)
    per_worker = rows["samples_per_s"] / rows["world_size"]
    return rows.assign(efficiency=per_worker / per_worker.groupby([rows[key] for key in keys]).transform("first"))


def rule_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """What ``draw_rules`` takes, plus the method, of the runs that name their rule; smoothed and thinned."""
    ruled = steps[steps["rule"].notna() & ~steps["skipped"]]
    if ruled.empty:
        return ruled.assign(method="", stream="")
    rows = _drawable(ruled, ["density", "threshold"])
    variants = rows["variant"].map(lambda variant: f", {variant}" if variant else "")
    named = rows.assign(
        method=rows["sparsifier"].str.replace(f"_({'|'.join(RULES)})$", "", regex=True),
        stream="seed " + rows["seed"].astype(str) + variants,
    )
    keys = ["method", "rule", "stream", "step"]
    columns = [*keys, "target_density", "density", "threshold"]
    return named.drop_duplicates(keys)[columns].sort_values(keys, ignore_index=True)


def with_total_bytes(frames: Frames) -> pd.DataFrame:
    """The epochs, and what rank 0 had sent after the steps done by the end of each."""
    done = frames.steps["step"] + 1.0
    total = frames.steps.groupby("run")["bytes_sent"].cumsum()
    sent = frames.steps[["run"]].assign(step=done, total_bytes=total).sort_values("step")
    return pd.merge_asof(frames.epochs.sort_values("step"), sent, on="step", by="run")


def _drawable(rows: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Smooth ``columns`` of each run by a running median over a hundredth of its rows, and thin the rows."""
    smooth = [
        run.rolling(len(run) // 100 | 1, center=True, min_periods=1).median()  # odd: centred on its step
        for _, run in rows.groupby("run")[columns]
    ]
    return _thinned(rows.assign(**pd.concat(smooth)) if smooth else rows)


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep every n-th step of those that a method's runs recorded, at most MAX_POINTS; seeds keep the same ones."""
    place = rows.groupby(METHOD)["step"].rank(method="dense") - 1
    return rows[place % (place.max() // MAX_POINTS + 1) == 0]
