"""Every figure that some runs allow, drawn and written."""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.config.errors import UserError
from experiments.reports.density_figure import at_several_densities, draw_densities
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
from experiments.reports.frames import Frames
from experiments.reports.length_figure import at_several_lengths, draw_lengths
from experiments.reports.measures import Metric, metric_of
from experiments.reports.method_curves import leading, rule_of
from experiments.reports.method_figure import draw_methods
from experiments.reports.names import KINDS, human, label
from experiments.reports.pages.table import FORM, TRAINING
from experiments.reports.provenance import differences
from experiments.reports.reached import reached, run_rows
from experiments.reports.reached_figure import draw_bytes
from experiments.reports.rule_figure import draw_rules
from experiments.reports.run_configs import EXPERIMENT
from experiments.reports.speed_figures import draw_throughput, draw_times
from experiments.reports.step_figures import draw_convergence, draw_density, draw_residuals
from experiments.reports.summary import of_study, summarise
from experiments.reports.tables import study_name

STUDY = EXPERIMENT[:3]  # what the rows of one table have in common


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The runs that one figure compares: one model, data set, number of workers and density."""

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

    @property
    def stem(self) -> str:
        """What the runs have in common, as part of a file name."""
        return re.sub(r"[^\w.-]", "_", f"{self.model}-{self.dataset}-n{self.world_size}-d{self.density:g}")


def groups(frames: Frames) -> Iterator[Group]:
    """Split the runs by figure; a dense run, the baseline, is in the figures of every density."""
    for (model, dataset, world_size), runs in frames.runs.groupby(["model", "dataset", "world_size"]):
        dense = runs["sparsifier"] == "dense"
        densities = sorted(runs.loc[~dense, "density"].unique()) or [1.0]
        for density in densities:
            part = _part(frames, runs[dense | (runs["density"] == density)])
            yield Group(
                model=str(model), dataset=str(dataset), world_size=int(str(world_size)), density=density, frames=part
            )


def draw_all(frames: Frames, out: Path, kinds: Collection[str] = KINDS) -> list[Path]:
    """Draw and write every figure of these kinds that the runs allow; returns the paths written.

    Raises:
        UserError: the runs allow none.
    """
    written = []
    for group in groups(frames):
        for kind, figure, numbers in _figures(group, kinds):
            written += _save(figure, numbers, out / f"{kind}-{group.stem}", group.frames.runs["run"], frames)
    if {"methods", "densities"} & set(kinds):
        written += _draw_studies(frames, out, kinds)
    if "bytes" in kinds:
        written += _draw_bytes(frames, out)
    if "lengths" in kinds:
        written += _draw_lengths(frames, out)
    if "throughput" in kinds:
        written += _draw_throughput(frames, out)
    if not written:
        raise UserError(f"these runs hold nothing to draw for {', '.join(kinds)}: choose among {', '.join(KINDS)}")
    return written


def _figures(group: Group, kinds: Collection[str]) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    coloured = leading(group.frames.epochs, group.metric)
    title = group.title + rule_of(coloured, group.metric)
    numbers = convergence_numbers(group.frames, group.metric)
    if "convergence" in kinds:
        yield "convergence", draw_convergence(numbers, group.metric, title, coloured=coloured), numbers
    numbers = time_numbers(group.frames)
    if "time" in kinds and not numbers.empty:
        yield "time", draw_times(numbers, group.title), numbers
    numbers = density_numbers(group.frames.steps)
    if "density" in kinds and group.density < 1 and not numbers.empty:
        yield "density", draw_density(numbers, title, coloured=coloured), numbers
    numbers = residual_numbers(group.frames.steps)
    if "residual" in kinds and not numbers.empty:
        yield "residual", draw_residuals(numbers, title, coloured=coloured), numbers
    if "rules" not in kinds:
        return
    for method, rows in rule_numbers(group.frames.steps).groupby("method"):
        if rows["rule"].nunique() > 1:
            yield f"rules-{method}", draw_rules(rows, f"{label(str(method))}: {group.title}"), rows


def _draw_studies(frames: Frames, out: Path, kinds: Collection[str]) -> list[Path]:
    """Draw the figures of the kinds "methods" and "densities", of all runs of one training."""
    written = []
    for study, rows in summarise(frames).groupby(STUDY):
        model, dataset, world_size = study
        metric, title, several = metric_of(rows["metric"]), study_name(*study), at_several_densities(rows)
        drawn: dict[str, tuple[Figure, pd.DataFrame]] = {}
        if "methods" in kinds and rows["sparsifier"].nunique() > 1 and (rows["density"] < 1).any():
            drawn["methods"] = draw_methods(rows, metric, title), rows
        if "densities" in kinds and not several.empty:
            drawn["densities"] = draw_densities(several, metric, title), several
        for kind, (figure, own) in drawn.items():
            runs = frames.runs.merge(own[[*EXPERIMENT, "variant"]])["run"]
            written += _save(figure, of_study(own), out / f"{kind}-{model}-{dataset}-n{world_size}", runs, frames)
    return written


def _draw_bytes(frames: Frames, out: Path) -> list[Path]:
    rows, written = reached(run_rows(frames)), []
    for training, own in rows.groupby(TRAINING) if not rows.empty else ():
        if own["sparsifier"].nunique() > 1 and own["bytes_90"].notna().any():
            model, dataset, world_size, epochs = training
            measure = metric_of(own["metric"]).label
            length = "1 epoch" if epochs == 1 else f"{epochs} epochs"
            title = f"Bytes to {measure}: {study_name(model, dataset, world_size)}, {length}"
            runs = frames.runs[(frames.runs[TRAINING] == [*training]).all(axis=1)]["run"]
            stem = out / f"bytes-{model}-{dataset}-n{world_size}-e{epochs}"
            written += _save(draw_bytes(own, f"{title}; hollow: not all seeds came there"), own, stem, runs, frames)
    return written


def _draw_lengths(frames: Frames, out: Path) -> list[Path]:
    runs = run_rows(frames)
    rows = reached(runs)
    drawn = rows if rows.empty else at_several_lengths(rows)
    if drawn.empty:
        return []
    of_these = runs.merge(drawn[[*TRAINING, *FORM]].drop_duplicates(), on=[*TRAINING, *FORM])["run"]
    title = "Distance to dense training of the same length, below 0 worse; each length has its own schedule of rates"
    return _save(draw_lengths(drawn, title), drawn, out / "lengths", of_these, frames)


def _draw_throughput(frames: Frames, out: Path) -> list[Path]:
    written = []
    for (model, dataset), runs in frames.runs.groupby(["model", "dataset"]):
        numbers = throughput_numbers(_part(frames, runs))
        if not numbers.empty:
            title = f"{human(str(model))} on {human(str(dataset))}: processes, the same batch on each"
            real = runs.loc[runs["cluster"] != SIMULATED, "run"]
            stem = out / f"throughput-{model}-{dataset}"
            written += _save(draw_throughput(numbers, title), numbers, stem, real, frames)
    return written


def _save(figure: Figure, numbers: pd.DataFrame, stem: Path, runs: Iterable[str], frames: Frames) -> list[Path]:
    """Write a figure; below it are those of its runs that are not whole, and in what their origins differ."""
    names = set(runs)
    unlike = differences(frames.origins, names)
    return save(figure, numbers, stem, names, notes=unlike)


def _part(frames: Frames, runs: pd.DataFrame) -> Frames:
    """Return some of the runs, and their records."""
    return Frames(
        runs=runs,
        steps=frames.steps[frames.steps["run"].isin(runs["run"])],
        epochs=frames.epochs[frames.epochs["run"].isin(runs["run"])],
    )
