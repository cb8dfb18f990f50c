"""What each method reached beside dense training, and the bytes and epochs until 90, 95 and 99 % of dense's end."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from experiments.config.units import human_bytes
from experiments.reports import earlier_rows
from experiments.reports.csv_files import write_csv
from experiments.reports.earlier_rows import NOTHING, REACHED, Earlier
from experiments.reports.frames import Frames
from experiments.reports.markdown import table as markdown_table
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import human, in_order, label
from experiments.reports.output import write_file
from experiments.reports.provenance import described
from experiments.reports.run_rows import SAME, STUDY, curves, origins_of, run_rows
from experiments.reports.run_rows import notes as notes_of_runs

SHARES = (0.9, 0.95, 0.99)  # of what dense training ends with

EXPLAINED = """\
Each row is the mean over n seeds of runs with the same settings, at the last epoch, ± half the range; *to dense* is
the distance to the mean of the dense runs of the same length, where more is better. *Density* is the share of
elements that an update touches, *sent* what rank 0 sent in the whole run. *90 %*, *95 %* and *99 %* are the bytes it
had sent, and the epochs, when a seed's measure was first at that share of dense's last (of a measure of which less is
better: at dense's last divided by that share), means over the seeds; "2 of 3" counts the seeds that got there where
not all did. Measures are taken at the ends of epochs. *Code* is the revision of the row's runs, *manifests* a digest of
their manifests, which hold code, machine, versions and data. What has no row, or fewer seeds than others, is not
finished."""


def reached(frames: Frames) -> pd.DataFrame:
    """Return ``means`` of the runs of some frames."""
    return means(run_rows(frames))


def means(runs: pd.DataFrame, earlier: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return a row per experiment that has a dense baseline, ``STUDY`` and method; numbers are means over seeds.

    Columns: num_seeds, the measure's key as ``metric``, value, half_range, to_dense (positive where better),
    measured_density, total_bytes, manifests, code, machine; and for each of SHARES, named 90, 95 and 99: num_90, the
    seeds that got there, bytes_90 and epochs_90, their means, NaN where none did. Empty without a dense row.

    Args:
        runs: rows of ``run_rows``.
        earlier: what this function gave for runs that are not at hand; a row stays unless ``runs`` has as many seeds
            of its experiment. Where one stays, the study's dense row stays too, and all are compared with that.
    """
    old = REACHED.empty() if earlier is None else earlier
    parts = []
    for study, own in curves(runs).groupby(STUDY):
        kept = earlier_rows.staying(old[(old[STUDY] == [*study]).all(axis=1)], own)
        dense = kept[kept["sparsifier"] == "dense"]
        target = float(dense["value"].iloc[0]) if len(dense) else _dense_end(own, metric_of(own["metric"]))
        if target is not None:
            parts.append(earlier_rows.merged(kept, own, _rows_of(own, target)))
    parts.append(earlier_rows.elsewhere(old, runs, STUDY))
    return _ordered(pd.concat([part for part in parts if not part.empty] or parts, ignore_index=True))


def _rows_of(epochs: pd.DataFrame, target: float) -> pd.DataFrame:
    """Return the rows of one study, given the evaluations of its runs and what dense ends with."""
    metric, rows = metric_of(epochs["metric"]), []
    for experiment, own in epochs.groupby(SAME):
        rows.append(dict(zip(SAME, experiment, strict=True)) | _row(own, metric, target) | _origin(own))
    return pd.DataFrame(rows)


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    if rows.empty:
        return rows
    order = {name: place for place, name in enumerate(in_order(rows["sparsifier"]))}
    keyed = rows.assign(place=rows["sparsifier"].map(order), sparse=-rows["density"])
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


def write_reached(frames: Frames, out: Path, earlier: Earlier = NOTHING) -> list[Path]:
    """Write reached.csv, reached.md and reached_runs.csv, where there is a dense row beside others; return the paths.

    Args:
        earlier: what is known of runs that are not at hand; its rows are written too.
    """
    runs = earlier.with_runs(run_rows(frames))
    rows = means(runs, earlier.means)
    if rows.empty or (rows["sparsifier"] == "dense").all():
        return []
    path = out / "reached.md"
    origins = origins_of(runs)
    names = [f"Runs, with {described(origins, runs['run'])}."] if origins else []
    write_file(path, markdown(rows, [*earlier_rows.notes(rows), *names, *notes_of_runs(runs), *frames.damage()]))
    return [write_csv(rows, out / "reached.csv"), path, write_csv(runs, out / "reached_runs.csv")]


def _dense_end(epochs: pd.DataFrame, metric: Metric) -> float | None:
    """Return the mean end of the dense runs, of several settings that of the best; None where there is none."""
    dense = epochs[epochs["sparsifier"] == "dense"]
    ends = dense.groupby("run").tail(1).groupby("variant")["value"].mean()
    return None if ends.empty else float(ends.max() if metric.higher_is_better else ends.min())


def _row(epochs: pd.DataFrame, metric: Metric, target: float) -> dict[str, object]:
    last = epochs.groupby("run").tail(1)
    ends, sign = last["value"], 1 if metric.higher_is_better else -1
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
        there = epochs[sign * epochs["value"] >= sign * level].groupby("run").head(1)
        name = f"{100 * share:g}"
        row |= {f"num_{name}": len(there), f"bytes_{name}": there["total_bytes"].mean()}
        row[f"epochs_{name}"] = there["epochs_done"].mean()
    return row


def _origin(epochs: pd.DataFrame) -> dict[str, object]:
    runs = epochs.drop_duplicates("run").sort_values("run")
    digests = "".join(runs["manifest"])
    return {
        "measured_density": runs["measured_density"].mean(),
        "manifests": hashlib.sha256(digests.encode()).hexdigest()[:8] if digests else "",
        "code": ", ".join(sorted(set(runs["code"]))),
        "machine": ", ".join(sorted(set(runs["machine"]))),
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
        ("code", lambda row: f"{row['code']}{earlier_rows.mark(row)}"),
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
