"""Write a comparison as a Markdown page."""

from collections.abc import Iterator

import pandas as pd

from experiments.reports.names import in_order, label
from experiments.tools.compare.measure import Comparison, ComparisonSettings
from experiments.tools.compare.numbers import front_methods, sparse_rows
from experiments.tools.shared.gradient_sources import TITLES
from experiments.tools.shared.markdown import Column, Columns, table_of

HOW_TO_READ = """\
Every method gets the same gradients on simulated ranks. Drawn gradients have the scale at which the threshold 1 / (2
sqrt k) selects about k normal values; recorded ones are those of a dense training. *density / target* is the density
of the update over the target density, a mean over steps; *error* its distance from 1, *worst* the largest after 20
steps (after half of fewer than 40). *sent* is bytes per rank and step over those of a dense all-reduce, of which
*indices* and *values*. *one update* is ||update - mean|| / ||mean|| of the gradients, *all updates* the same of the
sums of all steps up to the last; where the feedback corrects momentum, the mean is that of velocities. *mass kept* is
the worst step's 1 - ||sum acc - sum residual - n update||_1 / ||sum acc||_1: below 1, something was neither sent nor
kept. *selection* is the fastest rank's time to choose indices, in times of torch.topk on the whole vector; ranks
share the machine's cores, so it is an upper bound (selection.pdf shows one rank alone). Where a density policy counts
epochs, one is one step here. Methods that choose nothing are left out of selection.pdf.
"""
COLUMNS: Columns = {
    "density / target": Column("build_up", "{:.3g}"),
    "error": Column("density_error", "{:.2g}"),
    "worst": Column("worst_density_error", "{:.2g}"),
    "imbalance": Column("imbalance", "{:.2g}"),
    "sent": Column("bytes_share", "{:.3g}"),
    "indices": Column("indices_share", "{:.2g}"),
    "values": Column("values_share", "{:.2g}"),
    "one update": Column("step_error", "{:.3g}"),
    "all updates": Column("cumulative_error", "{:.3g}"),
    "mass kept": Column("mass_kept", "{:.4f}"),
    "selection": Column("select_topks", "{:.2g}"),
}
METHOD: Columns = {"method": Column("name")}


def report(opening: str, done: Comparison, numbers: pd.DataFrame, world_size: int, settings: ComparisonSettings) -> str:
    """Return the report: a table per stream for one number of workers, and one for the last stream by workers."""
    named = numbers.assign(name=numbers["method"].map(label))
    sparse = set(sparse_rows(numbers)["method"])
    whole = [label(name) for name in in_order(numbers["method"]) if name not in sparse]
    parts = [opening, HOW_TO_READ]
    if whole:
        parts.append(f"Send every element, so they are left out of the figures of density: {', '.join(whole)}.\n")
    if done.interrupted:
        parts.append("Stopped by the user before its end: what is missing was not run.\n")
    parts += [f"{line}\n" for line in done.failures]
    for stream, rows in named[named["world_size"] == world_size].groupby("stream", sort=False):
        parts += _stream(TITLES[str(stream)], rows, settings)
    parts += _by_workers(named)
    return "\n".join(parts)


def _stream(title: str, rows: pd.DataFrame, settings: ComparisonSettings) -> Iterator[str]:
    first = rows.iloc[0]
    workers = f"{first['world_size']} workers"
    yield f"## {title}: d = {first['numel']:,}, {workers}, density {settings.density:g}, {first['steps']} steps\n"
    fronts = "; ".join(
        f"of {name}: {', '.join(map(label, front_methods(rows, error)))}"
        for error, name in (("step_error", "one update"), ("cumulative_error", "all updates"))
    )
    yield f"On the front, least bytes first, {fronts}.\n"
    yield table_of(rows, {**METHOD, **COLUMNS}) + "\n"


def _by_workers(numbers: pd.DataFrame) -> Iterator[str]:
    """Yield each method's bytes and updates on the last stream by number of workers, if there are several."""
    stream = str(numbers["stream"].iloc[-1])
    rows = numbers[numbers["stream"] == stream]
    sizes = sorted(set(rows["world_size"]))
    for heading in ("density / target", "sent") if len(sizes) > 1 else ():
        yield f"## {TITLES[stream]}, by the number of workers: {heading}\n"
        found = rows.pivot(index="method", columns="world_size", values=COLUMNS[heading].key).rename_axis(columns=None)
        found = found.loc[in_order(found.index)].reset_index().assign(name=lambda own: own["method"].map(label))
        yield table_of(found, {**METHOD} | {str(size): COLUMNS[heading]._replace(key=size) for size in sizes}) + "\n"
