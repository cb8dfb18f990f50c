"""The numbers that figures of runs draw, from the frames of the runs."""

import pandas as pd

from experiments.reports.frames import METHOD, Frames
from experiments.reports.measures import Metric
from experiments.reports.summary import spread, stage_times

RULES = ("published", "repaired", "agreed")
SIMULATED = "simulated"  # workers that take turns in one process: their steps are not as long as those of real ones
MAX_POINTS = 400  # of one line; more cannot be seen and makes the PDF heavy


def convergence_numbers(frames: Frames, metric: Metric) -> pd.DataFrame:
    """Per method and epoch: num_seeds, mean step, time_s and total_bytes, and the ``spread`` of the measure.

    total_bytes is what a worker sent until then.
    """
    by_epoch = with_total_bytes(frames).groupby([*METHOD, "epoch"])
    means = by_epoch[["step", "time_s", "total_bytes"]].mean()
    means.insert(0, "num_seeds", by_epoch.size())
    return means.join(spread(by_epoch[[metric.key]])).reset_index()


def density_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Per sparse method, seed and step: target_density, density and density_error, smoothed and thinned to be drawn.

    Steps within a round of local steps, which exchange nothing, have none.
    """
    sparse = steps[(steps["sparsifier"] != "dense") & ~steps["skipped"] & steps["density"].notna()]
    lines = [_drawable(run, ["density", "density_error"]) for _, run in sparse.groupby("run")]
    columns = [*METHOD, "seed", "step", "target_density", "density", "density_error"]
    return pd.concat(lines)[columns].sort_values(columns[:4], ignore_index=True) if lines else sparse[columns]


def time_numbers(frames: Frames) -> pd.DataFrame:
    """Per method: num_seeds and the mean over seeds of ``stage_times``."""
    times = frames.runs.set_index("run")[METHOD].join(stage_times(frames.steps)).groupby(METHOD)
    means = times.mean()
    means.insert(0, "num_seeds", times.size())
    return means.reset_index()


def residual_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Per method, seed and step: residual_norm, in the steps in which it was measured; thinned to be drawn."""
    measured = steps[steps["residual_norm"].notna()]
    keys = [*METHOD, "seed", "step"]
    place = measured.groupby("run").cumcount()
    stride = place.max() // MAX_POINTS + 1 if len(measured) else 1
    return measured[place % stride == 0][[*keys, "residual_norm"]].sort_values(keys, ignore_index=True)


def throughput_numbers(frames: Frames) -> pd.DataFrame:
    """Per method, density and number of real workers: num_seeds, samples_per_s with its _min and _max, and efficiency.

    efficiency is samples_per_s per worker over that of the method's fewest workers. Simulated workers have no
    throughput. Empty unless runs with at least two numbers of workers are there.
    """
    real = frames.runs[frames.runs["cluster"] != SIMULATED].set_index("run")
    keys = [*METHOD, "asked_density"]
    columns = [*keys, "world_size", "num_seeds", *(f"samples_per_s{end}" for end in ("", "_min", "_max"))]
    if real["world_size"].nunique() < 2:
        return pd.DataFrame(columns=[*columns, "efficiency"])
    steps_per_s = 1000 / stage_times(frames.steps)["total_ms"]
    speeds = real.assign(samples_per_s=real["world_size"] * real["batch_size"] * real["accumulate"] * steps_per_s)
    by_size = speeds.groupby([*METHOD, "density", "world_size"])["samples_per_s"]
    rows = by_size.agg(["size", "mean", "min", "max"]).reset_index().set_axis(columns, axis=1)
    per_worker = rows["samples_per_s"] / rows["world_size"]
    return rows.assign(efficiency=per_worker / per_worker.groupby([rows[key] for key in keys]).transform("first"))


def rule_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """What ``draw_rules`` takes, plus the method, of the runs that name their rule; smoothed and thinned."""
    ruled = steps[steps["rule"].notna() & ~steps["skipped"]]
    lines = [_drawable(run, ["density", "threshold"]) for _, run in ruled.groupby("run")]
    if not lines:
        return ruled.assign(method="", stream="")
    rows = pd.concat(lines)
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


def _drawable(run: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Smooth ``columns`` by a running median over a hundredth of the run; keep at most MAX_POINTS steps."""
    window = len(run) // 100 | 1  # odd: centred on its step
    smooth = run[columns].rolling(window, center=True, min_periods=1).median()
    stride = run["step"].max() // MAX_POINTS + 1
    return run.assign(**smooth)[run["step"] % stride == 0]  # by step, so that seeds keep the same ones
