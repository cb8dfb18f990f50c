"""A comparison as a page of Markdown."""

import math
from collections.abc import Iterator

import pandas as pd

from experiments.reports.markdown import table
from experiments.reports.names import in_order, label
from experiments.studies.gradient_sources import TITLES
from experiments.studies.method_comparison.measure import Comparison, ComparisonSettings
from experiments.studies.method_comparison.numbers import front_methods, sparse_rows

HOW_TO_READ = """\
Every method gets the same gradients on simulated ranks. Drawn gradients have the scale at which the threshold
1 / (2 sqrt k) selects about k normal values; recorded ones are those of a dense training. *density / target* is the
density of the update over the target density, a mean over steps; *error* its distance from 1, *worst* the largest
after 20 steps (after half of fewer than 40). *sent* is bytes per rank and step over those of a dense all-reduce, of
which *indices* and *values*. *one update* is ||update - mean|| / ||mean|| of the gradients, *all updates* the same of
the sums of all steps up to the last; where the feedback corrects momentum, the mean is that of velocities. *mass kept*
is the worst step's 1 - ||sum acc - sum residual - n update||_1 / ||sum acc||_1: below 1, something was neither sent nor
kept; EF21 has none, for what it does not send is not meant to be sent later. *selection* is the fastest rank's time to
choose indices, in times of torch.topk on the whole vector; ranks share the machine's cores, so it is an upper bound
(selection.pdf shows one rank alone). Where a density policy counts epochs, one is one step here. Methods that choose
nothing are left out of selection.pdf.
"""
COLUMNS = [  # heading, column of the numbers, format
    ("density / target", "build_up", "{:.3g}"),
    ("error", "density_error", "{:.2g}"),
    ("worst", "worst_density_error", "{:.2g}"),
    ("imbalance", "imbalance", "{:.2g}"),
    ("sent", "bytes_share", "{:.3g}"),
    ("indices", "indices_share", "{:.2g}"),
    ("values", "values_share", "{:.2g}"),
    ("one update", "step_error", "{:.3g}"),
    ("all updates", "cumulative_error", "{:.3g}"),
    ("mass kept", "mass_kept", "{:.4f}"),
    ("selection", "select_topks", "{:.2g}"),
]


def report(opening: str, done: Comparison, numbers: pd.DataFrame, world_size: int, settings: ComparisonSettings) -> str:
    """Return the report: a table per stream, of one number of workers; the last one by their number; equal bytes."""
    parts = [opening, HOW_TO_READ, *_left_out(numbers)]
    if done.interrupted:
        parts.append("Stopped by the user before its end: what is missing was not run.\n")
    parts += [f"{line}\n" for line in done.failures]
    for stream, rows in numbers[numbers["world_size"] == world_size].groupby("stream", sort=False):
        parts += _stream(TITLES[str(stream)], rows, settings)
    parts += by_workers(numbers)
    if done.matches:
        parts += _equal_bytes(done, world_size, settings)
    return "\n".join(parts)


def _left_out(numbers: pd.DataFrame) -> Iterator[str]:
    sparse = set(sparse_rows(numbers)["method"])
    whole = [label(name) for name in in_order(numbers["method"]) if name not in sparse]
    if whole:
        yield f"Send every element, so they are left out of the figures of density: {', '.join(whole)}.\n"


def _stream(title: str, rows: pd.DataFrame, settings: ComparisonSettings) -> Iterator[str]:
    first = rows.iloc[0]
    workers = f"{first['world_size']} workers"
    yield f"## {title}: d = {first['numel']:,}, {workers}, density {settings.density:g}, {first['steps']} steps\n"
    fronts = "; ".join(
        f"of {name}: {', '.join(map(label, front_methods(rows, error)))}"
        for error, name in (("step_error", "one update"), ("cumulative_error", "all updates"))
    )
    yield f"On the front, least bytes first, {fronts}.\n"
    lines = [[label(row["method"]), *(_cell(row[key], text) for _, key, text in COLUMNS)] for _, row in rows.iterrows()]
    yield table(["method", *(name for name, _, _ in COLUMNS)], lines) + "\n"


def _cell(value: float, text: str) -> str:
    return "-" if math.isnan(value) else text.format(value)


def by_workers(numbers: pd.DataFrame) -> Iterator[str]:
    """Yield what each method sends and updates on the last stream with each number of workers, if there are several."""
    stream = str(numbers["stream"].iloc[-1])
    rows = numbers[numbers["stream"] == stream]
    sizes = sorted(set(rows["world_size"]))
    if len(sizes) == 1:
        return
    for heading, key, text in (column for column in COLUMNS if column[1] in ("bytes_share", "build_up")):
        yield f"## {TITLES[stream]}, by the number of workers: {heading}\n"
        found = rows.pivot(index="method", columns="world_size", values=key)
        lines = [
            [label(name), *(_cell(found.loc[name, size], text) for size in sizes)] for name in in_order(found.index)
        ]
        yield table(["method", *map(str, sizes)], lines) + "\n"


def _equal_bytes(done: Comparison, world_size: int, settings: ComparisonSettings) -> Iterator[str]:
    reference = f"{label(str(settings.equal_bytes))} at density {settings.density:g}, {world_size} workers"
    yield f"## Equal bytes: as many as {reference}\n"
    lines = [[label(m["method"]), f"{m['density']:.4g}", f"{m['bytes_share']:.3g}"] for m in done.matches]
    yield table(["method", "density", "sent"], lines) + "\n"
