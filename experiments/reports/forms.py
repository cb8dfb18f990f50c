"""Compare the forms of a study with dense training: means over runs that differ only in the seed."""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache

import pandas as pd

from experiments.config.errors import UserError
from experiments.config.identity import identity
from experiments.config.keys import flat
from experiments.config.units import human_count
from experiments.planning.costs import Link
from experiments.reports.frames import Frames
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import human, in_order
from experiments.reports.table import FORM, OPTIONAL, TRAINING, configs, points, rows_of
from experiments.reports.times import RATES, ethernet, exchange_s

KEYS = [*TRAINING, *FORM, "metric"]
BATCH = ["model", "dataset", "device", "batch_size"]  # a worker computes as long for one batch where these agree
SHARES = (0.9, 0.95, 0.99)  # of what dense training ends with
SECONDS = {"at_100mbit_s": "at_100mbit_ms", "at_1gbit_s": "at_1gbit_ms"}  # column -> key of RATES
GRADIENTS, STEPS = "gradients", "each worker's own step"  # forms of a language model, by what is exchanged
POINTS, SHARE = 0.01, 0.02  # how far below dense a share may be, and how far above it what is better small
SELDOM = re.compile(r"steps|own step|momentum|rounds\.|H=")  # of a form that does not exchange gradients at every step


def forms(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per form and training of some rows of the table of runs; empty where nothing is finished.

    Columns: KEYS; num_seeds; value, low, high and half_range over the seeds at the last evaluation, NaN where one of
    them is not finite; to_dense, the distance to the best dense runs of the same training that exchange gradients at
    every step, positive where better, paired_range, half the range of that distance over seeds, each to the dense run
    of its seed, and of_dense, the share of their bytes, all NaN without such; total_bytes,
    step_bytes and batch_bytes, of rank 0 in the whole run, in a step and for each batch of a worker; seconds of the
    whole run on links (SECONDS); measured_density and OPTIONAL, see table.py; trials, at how many rates the form was
    tried; for each of SHARES, named 90, 95 and 99, num_90, how many seeds came to that share of dense's end, and
    bytes_90 and epochs_90, their means until then; code, machine, manifests (a digest); is_mean, whether the records of
    its runs are gone. Such a row stays while fewer runs of its form are in the table.
    """
    found = points(with_settings(table)).sort_values("run", kind="stable", ignore_index=True)
    last = found.groupby("run", sort=False).tail(1)
    last = last.assign(**{column: _seconds(last, key) for column, key in SECONDS.items()})
    means = last[last["kind"] == "mean"].rename(columns={"manifest": "manifests"}).assign(is_mean=True)
    rows = pd.concat([_of_runs(last[last["kind"] == "run"]), means], ignore_index=True)
    rows = rows.sort_values("num_seeds", ascending=False, kind="stable").drop_duplicates(KEYS)
    rows = rows.assign(
        half_range=(rows["high"] - rows["low"]) / 2,
        step_bytes=rows["total_bytes"] / rows["step"],
        batch_bytes=rows["total_bytes"] / (rows["step"] * rows["batches"]),
        target_density=rows["target_density"].fillna(rows["density"]),
        build_up=rows["build_up"].fillna(rows["measured_density"] / rows["density"]),
    )
    rows = _with_pairs(beside_dense(rows), last[last["kind"] == "run"])
    return ordered(_with_levels(rows, found[found["kind"] == "run"]), [*TRAINING, "-density", "method", "form", "rate"])


@lru_cache(maxsize=1)
def forms_of(frames: Frames) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of all runs of some folders, and their forms; the caller must not change them.

    A form is what a run's variant says beside its length.
    """
    words = {str(run): text.split(", ") for run, text in frames.runs.set_index("run")["variant"].items()}
    named = {run: ", ".join(word for word in own if not word.startswith("epochs=")) for run, own in words.items()}
    runs = rows_of(frames, named)
    return runs, forms(runs)


def ends(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run of some rows of the table of runs: its last evaluation, and ``gain``, more of it better."""
    last = points(table).groupby("run", sort=False).tail(1)
    return last.assign(gain=last["metric"].map(sign_of) * last["value"]).drop(columns="config")


def with_settings(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with batch_size, sequences in a worker's batch, batches, those in a step, and their device."""
    columns = ["batch_size", "accumulate", "cluster.device"]
    found = pd.DataFrame(configs(table), index=table.index).reindex(columns=columns)
    return table.assign(
        batch_size=found["batch_size"].astype(float),
        batches=found["accumulate"].fillna(1.0),
        device=found["cluster.device"],
    )


def beside_dense(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with to_dense, of_dense, dense (what dense ends with) and trials."""
    sign = rows["metric"].map(sign_of)
    is_plain = (rows["sparsifier"] == "dense") & ~rows["form"].str.contains(SELDOM)
    gains = rows[is_plain].assign(gain=sign * rows["value"]).sort_values("gain", na_position="first")
    best = gains.drop_duplicates(TRAINING, keep="last")
    named = best[[*TRAINING, "value", "total_bytes"]].rename(columns={"value": "dense", "total_bytes": "dense_bytes"})
    found = rows.merge(named, on=TRAINING, how="left")
    sign = found["metric"].map(sign_of)
    return found.assign(
        to_dense=sign * (found["value"] - found["dense"]) + 0.0,
        of_dense=found["total_bytes"] / found["dense_bytes"],
        trials=found.groupby([*TRAINING, *FORM[:3]])["rate"].transform("nunique"),
    ).drop(columns="dense_bytes")


def _with_pairs(rows: pd.DataFrame, last: pd.DataFrame) -> pd.DataFrame:
    """Return rows with paired_range: half the range, over seeds, of the distance to the dense run of the same seed."""
    same = [*TRAINING, "metric", "seed"]
    best = rows[rows["sparsifier"].eq("dense") & rows["value"].eq(rows["dense"])]
    dense = last.merge(best[KEYS], on=KEYS)[[*same, "value"]]
    pairs = last.merge(dense, on=same, suffixes=("", "_of_dense"))
    pairs = pairs.assign(paired_range=pairs["value"] - pairs["value_of_dense"])
    ranges = pairs.groupby(KEYS)["paired_range"].agg(lambda away: (away.max() - away.min()) / 2)
    return rows.merge(ranges.reset_index(), on=KEYS, how="left")


def in_words(rows: pd.DataFrame) -> str:
    """Return what the trainings of some rows have in common: ``NeuMF on MovieLens-100K, 4 workers, 8 epochs``."""
    first = rows.iloc[0]
    words = [f"{model_in_words(first)} on {human(str(first['dataset']))}"]
    for column, unit in (("world_size", "worker"), ("epochs", "epoch")):
        if rows[column].nunique() == 1:
            words.append(f"1 {unit}" if first[column] == 1 else f"{first[column]} {unit}s")
    return ", ".join(words)


def model_in_words(row: "pd.Series") -> str:
    """Return the name of a run's model and, where it is known, how many parameters it has."""
    size, name = row.get("parameters", math.nan), human(str(row["model"]))
    return name if pd.isna(size) else f"{name} ({human_count(size)} parameters)"


def at_best_rate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the row of each form with the best of its rates, the best form first."""
    gain = rows["metric"].map(sign_of) * rows["value"]
    ordered = rows.assign(gain=gain).sort_values("gain", ascending=False, kind="stable")
    return ordered.drop_duplicates([*TRAINING, *FORM[:3]]).drop(columns="gain")


def at_several_lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose method ended trainings of several lengths, and their dense rows."""
    is_dense = rows["sparsifier"] == "dense"
    sparse = rows[~is_dense]
    own = [*TRAINING[:3], *FORM[:3]]
    several = sparse[sparse.groupby(own)["epochs"].transform("nunique") > 1]
    dense = rows[is_dense].merge(several[TRAINING].drop_duplicates())
    return pd.concat([dense, several], ignore_index=True)


def loss_curves(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per form and evaluation of bits per byte, means over its runs that were evaluated before the end.

    Columns: TRAINING and FORM; num_seeds; step; tokens of all workers, bytes that rank 0 sent, and seconds on links
    (the keys of RATES) until then; test_loss, in nats per byte.

    Args:
        table: rows of the table of runs.
    """
    own = table[table["kind"] == "run"]
    lengths = [int(str(config["dataset.sequence_length"])) for config in configs(own)]
    found = points(with_settings(own.assign(sequence=lengths)))
    found = found[found.groupby("run")["step"].transform("size") > 1]
    size = found["world_size"] * found["batch_size"] * found["batches"] * found["sequence"]
    found = found.assign(
        tokens=found["step"] * size,
        bytes=found["total_bytes"],
        **{key: seconds_on_link(found, ethernet(rate)) for key, rate in RATES.items()},
        test_loss=math.log(2) * found["value"],
    )
    grouped = found.groupby([*TRAINING, *FORM, "step"])
    means = grouped[["tokens", "bytes", *RATES, "test_loss"]].mean().assign(num_seeds=grouped.size())
    return means.reset_index()


def with_goal(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of methods with several targets, and the best dense one, with ``keeps_up``."""
    metric, is_dense = metric_of(rows["metric"]), rows["sparsifier"] == "dense"
    best = rows[is_dense].nlargest(1, "to_dense")
    room = abs(goal_of(best["value"].iloc[0], metric) - best["value"].iloc[0])
    several = rows.groupby(["sparsifier", "form"])["density"].transform("nunique") > 1
    return rows.assign(keeps_up=rows["to_dense"] >= -room)[(several & ~is_dense) | rows.index.isin(best.index)]


def goal_of(dense: float, metric: Metric) -> float:
    """Return what is just level with dense."""
    return dense - POINTS if metric.higher_is_better else dense * (1 + SHARE)


def sign_of(metric: str) -> int:
    """Return 1 for a measure of which more is better, else -1."""
    return 1 if metric_of([metric]).higher_is_better else -1


def _of_runs(last: pd.DataFrame) -> pd.DataFrame:
    _check_repetitions(last)
    rows = last.groupby(KEYS, dropna=False).agg(
        num_seeds=("run", "size"),
        # NaN where one of the seeds is: a run that failed is not averaged away.
        value=("value", lambda values: values.mean(skipna=False)),
        low=("value", lambda values: values.min(skipna=False)),
        high=("value", lambda values: values.max(skipna=False)),
        **{
            column: (column, "mean") for column in ("measured_density", "total_bytes", "compute_s", *SECONDS, *OPTIONAL)
        },
        **{column: (column, "first") for column in ("step", "batches", "batch_size")},
        **{column: (column, lambda texts: ", ".join(sorted(set(texts)))) for column in ("code", "machine")},
        manifests=("manifest", _digest),
    )
    return rows.reset_index().assign(is_mean=False, reached="")


def ordered(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return rows in the order of some columns, ``-column`` for the largest first; ``method`` is the methods' own."""
    places = {name: place for place, name in enumerate(in_order(rows["sparsifier"]))}
    keyed = rows.assign(method=rows["sparsifier"].map(places))
    keys = [key.lstrip("-") for key in by]
    found = keyed.sort_values(keys, ascending=[not key.startswith("-") for key in by], kind="stable")
    return found.drop(columns="method").reset_index(drop=True)


def _check_repetitions(runs: pd.DataFrame) -> None:
    """Raise UserError where runs that would be taken as seeds of one form differ in more than the seed."""
    identities = [identity(flat(config)) | {"seed": None} for config in configs(runs)]
    settings = [json.dumps(each, sort_keys=True, default=str) for each in identities]
    for _, own in runs.assign(settings=settings).groupby(KEYS, dropna=False):
        if len(first := own.drop_duplicates("settings")["run"]) > 1:
            raise UserError(
                f"{' and '.join(first[:2])} differ in more than the seed, and in nothing that the table names: "
                "leave one out"
            )


def _seconds(last: pd.DataFrame, rate: str) -> pd.Series:
    """Return the seconds of each run on a link: what was sent, and the computation of the fastest run of that BATCH."""
    own = seconds_on_link(last, ethernet(RATES[rate])).where(last["num_collectives"].notna())
    return own.fillna(last[next(column for column, key in SECONDS.items() if key == rate)])


def seconds_on_link(found: pd.DataFrame, link: Link) -> pd.Series:
    """Return the seconds until each evaluation on a link: all computation, and all messages one after the other.

    Computation is that of the fastest run with the same BATCH: what ran beside others took longer.

    Args:
        found: ``points`` of rows with settings.
    """
    computation = found.groupby(BATCH, dropna=False)["compute_s"].transform("min") * found["batches"] * found["step"]
    return computation + exchange_s(found["total_bytes"], found["num_collectives"], found["world_size"], link)


def _with_levels(rows: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    own = found.merge(rows[[*KEYS, "dense"]], on=KEYS)
    sign = own["metric"].map(sign_of)
    for share in SHARES:
        level = own["dense"] * share ** sign.where(sign > 0, -1)
        there = own[sign * own["value"] >= sign * level].groupby("run").head(1)
        name = f"{100 * share:g}"
        counted = there.groupby(KEYS, dropna=False).agg(
            **{f"num_{name}": ("run", "size")},
            **{f"bytes_{name}": ("total_bytes", "mean"), f"epochs_{name}": ("epochs_done", "mean")},
        )
        rows = rows.merge(counted.reset_index(), on=KEYS, how="left")
    for place, text in rows.loc[rows["is_mean"], "reached"].items():
        for name, *numbers in (part.split(",") for part in str(text).split(";") if part):
            rows.loc[place, [f"num_{name}", f"bytes_{name}", f"epochs_{name}"]] = [
                float(each or "nan") for each in numbers
            ]
    return rows.fillna({f"num_{100 * share:g}": 0 for share in SHARES})


def _digest(manifests: pd.Series) -> str:
    digests = "".join(manifests)
    return hashlib.sha256(digests.encode()).hexdigest()[:8] if digests else ""
