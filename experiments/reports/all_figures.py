"""Every figure that some runs allow, drawn and written."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.config.errors import UserError
from experiments.reports.figure_numbers import (
    SIMULATED,
    convergence_numbers,
    density_numbers,
    residual_numbers,
    rule_numbers,
    throughput_numbers,
    time_numbers,
)
from experiments.reports.figure_parts import save
from experiments.reports.form_lines import at_several_lengths, draw_by_density, draw_lengths
from experiments.reports.form_rows import draw_bytes, draw_forms
from experiments.reports.forms import forms
from experiments.reports.frames import Frames
from experiments.reports.measures import Metric, metric_of
from experiments.reports.method_curves import leading, rule_of
from experiments.reports.names import KINDS, human, label
from experiments.reports.page import in_words
from experiments.reports.provenance import differences
from experiments.reports.rule_figure import draw_rules
from experiments.reports.speed_figures import draw_throughput, draw_times
from experiments.reports.step_figures import draw_convergence, draw_density, draw_residuals
from experiments.reports.table import FORM, TRAINING, run_rows


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure: its kind, the rest of its file's name, the numbers that are in it, and the runs that these are of."""

    kind: str
    of: str
    figure: Figure
    numbers: pd.DataFrame
    runs: pd.Series


def draw_all(frames: Frames, out: Path, kinds: Collection[str] = KINDS) -> list[Path]:
    """Draw and write every figure of these kinds that the runs allow; returns the paths written.

    Below a figure stands in what the origins of its runs differ.

    Raises:
        UserError: the runs allow none.
    """
    written = []
    for each in [*_of_steps(frames, kinds), *_of_forms(frames, kinds), *_of_workers(frames, kinds)]:
        stem, runs = out / re.sub(r"[^\w.-]", "_", f"{each.kind}-{each.of}".rstrip("-")), set(each.runs)
        written += save(each.figure, each.numbers, stem, runs, notes=differences(frames.origins, runs))
    if not written:
        raise UserError(f"these runs hold nothing to draw for {', '.join(kinds)}: choose among {', '.join(KINDS)}")
    return written


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The runs that one figure over steps compares: one model, data set, number of workers and density."""

    model: str
    dataset: str
    world_size: int
    density: float
    frames: Frames

    @property
    def metric(self) -> Metric:
        """What its runs are measured by."""
        return metric_of(self.frames.epochs["metric"])

    @property
    def title(self) -> str:
        """What the runs have in common."""
        clusters = " and ".join(sorted(self.frames.runs["cluster"].unique()))
        workers = f"{self.world_size} workers ({clusters})" if self.world_size > 1 else "1 worker"
        return f"{human(self.model)} on {human(self.dataset)}, {workers}, density\N{NO-BREAK SPACE}{self.density:g}"


def groups(frames: Frames) -> Iterator[Group]:
    """Split the runs by figure; a dense run, the baseline, is in the figures of every density."""
    for (model, dataset, world_size), runs in frames.runs.groupby(TRAINING[:3]):
        dense = runs["sparsifier"] == "dense"
        densities = sorted(runs.loc[~dense, "density"].unique()) or [1.0]
        for density in densities:
            part = _part(frames, runs[dense | (runs["density"] == density)])
            yield Group(
                model=str(model), dataset=str(dataset), world_size=int(str(world_size)), density=density, frames=part
            )


def _of_steps(frames: Frames, kinds: Collection[str]) -> Iterator[Drawing]:
    for group in groups(frames):
        of = f"{group.model}-{group.dataset}-n{group.world_size}-d{group.density:g}"
        for kind, figure, numbers in _of_group(group, kinds):
            yield Drawing(kind, of, figure, numbers, group.frames.runs["run"])


def _of_group(group: Group, kinds: Collection[str]) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    steps, metric = group.frames.steps, group.metric
    coloured = leading(group.frames.epochs, metric)
    title = group.title + rule_of(coloured, metric)
    numbers = convergence_numbers(group.frames, metric)
    if "convergence" in kinds and numbers["epoch"].nunique() > 1:  # one point is no curve
        yield "convergence", draw_convergence(numbers, metric, title, coloured=coloured), numbers
    numbers = time_numbers(group.frames)
    if "time" in kinds and not numbers.empty:
        yield "time", draw_times(numbers, group.title), numbers
    numbers = density_numbers(steps)
    if "density" in kinds and group.density < 1 and not numbers.empty:
        yield "density", draw_density(numbers, title, coloured=coloured), numbers
    numbers = residual_numbers(steps)
    if "residual" in kinds and not numbers.empty:
        yield "residual", draw_residuals(numbers, title, coloured=coloured), numbers
    for method, rows in rule_numbers(steps).groupby("method") if "rules" in kinds else ():
        if rows["rule"].nunique() > 1:
            yield f"rules-{method}", draw_rules(rows, f"{label(str(method))}: {group.title}"), rows


def _of_forms(frames: Frames, kinds: Collection[str]) -> Iterator[Drawing]:
    """Draw what all runs of one training reached and sent, and the distance to dense over its lengths."""
    runs = run_rows(frames)
    rows = forms(runs)
    for training, own in rows.groupby(TRAINING):
        model, dataset, world_size, epochs = training
        of, title = f"{model}-{dataset}-n{world_size}-e{epochs}", in_words(own)
        named = runs[(runs[TRAINING] == [*training]).all(axis=1)]["run"]
        sparse = own[own["sparsifier"] != "dense"]
        if "methods" in kinds and len(own) > 1 and len(sparse):
            yield Drawing("methods", of, draw_forms(own, title), own, named)
        if "densities" in kinds and (sparse.groupby(["sparsifier", "form"])["density"].nunique() > 1).any():
            yield Drawing("densities", of, draw_by_density(own, title), own, named)
        if "bytes" in kinds and len(sparse) and own["bytes_90"].notna().any():
            text = f"Bytes to {metric_of(own['metric']).label}: {title}; hollow: not all seeds came there"
            yield Drawing("bytes", of, draw_bytes(own, text), own, named)
    several = at_several_lengths(rows[rows["to_dense"].notna()])
    if "lengths" in kinds and not several.empty:
        title = (
            "Distance to dense training of the same length, below 0 worse; each length has its own schedule of rates"
        )
        named = runs.merge(several[[*TRAINING, *FORM]].drop_duplicates(), on=[*TRAINING, *FORM])["run"]
        yield Drawing("lengths", "", draw_lengths(several, title), several, named)


def _of_workers(frames: Frames, kinds: Collection[str]) -> Iterator[Drawing]:
    """Draw throughput, over the numbers of real workers."""
    for (model, dataset), runs in frames.runs.groupby(TRAINING[:2]) if "throughput" in kinds else ():
        numbers = throughput_numbers(_part(frames, runs))
        if not numbers.empty:
            title = f"{human(str(model))} on {human(str(dataset))}: processes, the same batch on each"
            real = runs.loc[runs["cluster"] != SIMULATED, "run"]
            yield Drawing("throughput", f"{model}-{dataset}", draw_throughput(numbers, title), numbers, real)


def _part(frames: Frames, runs: pd.DataFrame) -> Frames:
    """Return some of the runs, and their records."""
    return Frames(
        runs=runs,
        steps=frames.steps[frames.steps["run"].isin(runs["run"])],
        epochs=frames.epochs[frames.epochs["run"].isin(runs["run"])],
    )
