"""What each method reached beside dense training, and the bytes and epochs until 90, 95 and 99 % of dense's end."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from experiments.config.units import human_bytes
from experiments.reports.csv_files import write_csv
from experiments.reports.figure_numbers import with_total_bytes
from experiments.reports.frames import METHOD, Frames
from experiments.reports.markdown import table as markdown_table
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import human, in_order, label
from experiments.reports.output import write_file
from experiments.reports.provenance import described
from experiments.reports.run_configs import EXPERIMENT

SHARES = (0.9, 0.95, 0.99)  # of what dense training ends with
STUDY = [
    *EXPERIMENT[:3],
    "epochs",
]  # runs of another length have another schedule of rates, and a baseline of their own

EXPLAINED = """\
Each row is the mean over n seeds of runs with the same settings, at the last epoch, ± half the range; *to dense* is
the distance to the mean of the dense runs of the same length, where more is better. *Density* is the share of
elements that an update touches, *sent* what rank 0 sent in the whole run. *90 %*, *95 %* and *99 %* are the bytes it
had sent, and the epochs, when a seed's measure was first at that share of dense's last (of a measure of which less is
better: at dense's last divided by that share), means over the seeds; "2 of 3" counts the seeds that got there where
not all did. Measures are taken at the ends of epochs. *Manifests* is a digest of the rows' manifests, which hold
code, machine, versions and data. What has no row, or fewer seeds than others, is not finished."""


def reached(frames: Frames) -> pd.DataFrame:
    """Return a row per experiment that has a dense baseline, ``STUDY`` and method; numbers are means over seeds.

    Columns: num_seeds, the measure's key as ``metric``, value, half_range, to_dense (positive where better),
    measured_density, total_bytes, manifests; and for each of SHARES, named 90, 95 and 99: num_90, the seeds that got
    there, bytes_90 and epochs_90, their means, NaN where none did. Empty without a dense run.
    """
    rows = []
    epochs = with_total_bytes(frames).merge(frames.runs[["run", "epochs"]], on="run")
    epochs["variant"] = epochs["variant"].map(_without_length)
    for study, runs in frames.runs.groupby(STUDY):
        of_study = epochs[epochs["run"].isin(runs["run"])]
        metric = metric_of(of_study["metric"])
        target = _dense_end(of_study, metric)
        if target is None:
            continue
        for method, own in of_study.groupby(["asked_density", *METHOD]):
            names = dict(zip([*STUDY, "density", *METHOD], [*study, *method], strict=True))
            rows.append(names | _row(own, metric, target) | _traffic(frames, list(own["run"].unique())))
    frame = pd.DataFrame(rows)
    if frame.empty:
        return frame
    order = {name: place for place, name in enumerate(in_order(frame["sparsifier"]))}
    keyed = frame.assign(place=frame["sparsifier"].map(order), sparse=-frame["density"])
    return keyed.sort_values([*STUDY, "sparse", "place", "variant"], ignore_index=True).drop(
        columns=["place", "sparse"]
    )


def markdown(rows: pd.DataFrame, notes: Sequence[str] = ()) -> str:
    """Write the rows of ``reached`` as one table per study, with what the columns mean and notes."""
    blocks = ["# What was reached, and after how many bytes", EXPLAINED]
    for study, own in rows.groupby(STUDY):
        model, dataset, world_size, epochs = study
        metric = metric_of(own["metric"])
        shown = [[show(row) for _, show in _columns(metric)] for _, row in own.iterrows()]
        better = "" if metric.higher_is_better else " (less is better)"
        blocks.append(f"## {human(str(model))} on {human(str(dataset))}, {world_size} workers, {epochs} epochs{better}")
        blocks.append(markdown_table([name for name, _ in _columns(metric)], shown))
    return "\n\n".join([*blocks, *notes]) + "\n"


def write_reached(frames: Frames, out: Path) -> list[Path]:
    """Write reached.csv and reached.md, where there is a dense run beside others; return the paths."""
    rows = reached(frames)
    if rows.empty or (rows["sparsifier"] == "dense").all():
        return []
    path = out / "reached.md"
    names = [f"Runs, with {described(frames.origins, frames.runs['run'])}."] if frames.origins else []
    write_file(path, markdown(rows, [*names, *frames.notes()]))
    return [write_csv(rows, out / "reached.csv"), path]


def _without_length(variant: str) -> str:
    """Return what a variant says beside the number of epochs, which is the study's."""
    return ", ".join(part for part in variant.split(", ") if not part.startswith("epochs="))


def _dense_end(epochs: pd.DataFrame, metric: Metric) -> float | None:
    """Return the mean end of the dense runs, of several settings that of the best; None where there is none."""
    dense = epochs[epochs["sparsifier"] == "dense"]
    ends = dense.groupby("run").tail(1).groupby("variant")[metric.key].mean()
    return None if ends.empty else float(ends.max() if metric.higher_is_better else ends.min())


def _row(epochs: pd.DataFrame, metric: Metric, target: float) -> dict[str, object]:
    last = epochs.groupby("run").tail(1)
    ends, sign = last[metric.key], 1 if metric.higher_is_better else -1
    row: dict[str, object] = {
        "num_seeds": len(ends),
        "metric": metric.key,
        "value": ends.mean(),
        "half_range": (ends.max() - ends.min()) / 2,
        "to_dense": sign * (ends.mean() - target),
        "total_bytes": last["total_bytes"].mean(),
    }
    for share in SHARES:
        level = target * share if metric.higher_is_better else target / share
        there = epochs[sign * epochs[metric.key] >= sign * level].groupby("run").head(1)
        name = f"{100 * share:g}"
        row |= {f"num_{name}": len(there), f"bytes_{name}": there["total_bytes"].mean()}
        row[f"epochs_{name}"] = (there["epoch"] + 1).mean()
    return row


def _traffic(frames: Frames, runs: Sequence[str]) -> dict[str, object]:
    steps = frames.steps[frames.steps["run"].isin(runs) & ~frames.steps["skipped"]]
    digests = "".join(frames.manifests.get(run, "") for run in sorted(runs))
    return {
        "measured_density": steps.groupby("run")["density"].mean().mean(),
        "manifests": hashlib.sha256(digests.encode()).hexdigest()[:8] if digests else "",
    }


def _columns(metric: Metric) -> list[tuple[str, Callable[[pd.Series], str]]]:
    return [
        ("method", lambda row: label(row["sparsifier"], row["variant"])),
        ("target", lambda row: "-" if row["sparsifier"] == "dense" else f"{row['density']:g}"),
        ("n", lambda row: f"{row['num_seeds']}"),
        (metric.column, lambda row: _score(row, metric)),
        ("to dense", lambda row: "" if row["sparsifier"] == "dense" else _signed(row["to_dense"], metric)),
        ("density", lambda row: f"{row['measured_density']:.3g}"),
        ("sent", lambda row: human_bytes(row["total_bytes"])),
        *((f"{100 * share:g} %", _reached_at(f"{100 * share:g}")) for share in SHARES),
        ("manifests", lambda row: f"`{row['manifests']}`" if row["manifests"] else "-"),
    ]


def _score(row: pd.Series, metric: Metric) -> str:
    spread = f" ± {metric.format(row['half_range'])}" if row["num_seeds"] > 1 else ""
    return f"{metric.format(row['value'])}{spread}"


def _signed(value: float, metric: Metric) -> str:
    text = metric.format(value)
    return text if text.startswith("-") else f"+{text}"


def _reached_at(share: str) -> Callable[[pd.Series], str]:
    def show(row: pd.Series) -> str:
        there, seeds = row[f"num_{share}"], row["num_seeds"]
        if not there:
            return "never"
        some = f" ({there} of {seeds})" if there < seeds else ""
        return f"{human_bytes(row[f'bytes_{share}'])}, {row[f'epochs_{share}']:.3g}{some}"

    return show
