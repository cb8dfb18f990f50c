"""Every figure that some finished runs allow, with the numbers that it draws: over steps, of times, of forms."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.config.errors import UserError
from experiments.config.schema import SIMULATED
from experiments.config.units import three_digits
from experiments.reports.figure_parts import (
    Lines,
    Panel,
    handles_of,
    head,
    log_with_zero,
    new_figure,
    plain_log,
    save,
    show_bytes,
    show_metric,
    show_percent,
    show_values,
)
from experiments.reports.form_figures import draw_by_density, draw_bytes, draw_forms, draw_lengths
from experiments.reports.forms import FORM, TRAINING, at_several_lengths, forms, in_words
from experiments.reports.frames import METHOD, STAGES, Frames
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import KINDS, human, in_legend, in_order
from experiments.reports.plot_style import (
    COLUMN_INCHES,
    FREE,
    GREEN,
    GREY_LINE,
    MARKERS,
    PAGE_INCHES,
    SKY,
    TARGET_LINE,
    VERMILLION,
    LineSettings,
    coloured_methods,
    lines_of,
    plain,
    style,
)
from experiments.reports.provenance import differences
from experiments.reports.table import run_rows
from experiments.reports.times import stage_times

MAX_POINTS = 400  # of one line; more cannot be seen and makes the PDF heavy
DENSITY = {"density": "density", "density_error": "density error"}
RESIDUAL = {"residual_norm": "norm of the residual"}
STAGE_FILLS: dict[str, LineSettings] = {
    stage: {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
    for stage, color, hatch in zip(STAGES, (SKY, VERMILLION, GREEN, "#dddddd"), ("", "////", "....", ""), strict=True)
}
Drawn = tuple[str, Figure, pd.DataFrame, pd.Series]
"""A figure: the name of its files, itself, the numbers that are in it, and the runs that these are of."""


def draw_all(frames: Frames, out: Path, kinds: Collection[str] = KINDS) -> list[Path]:
    """Draw and write every figure of these kinds that the runs allow; returns the paths written.

    Below a figure stands in what the origins of its runs differ.

    Raises:
        UserError: the runs allow none.
    """
    written = []
    for name, figure, numbers, runs in [
        *_of_steps(frames, kinds),
        *_of_forms(frames, kinds),
        *_of_workers(frames, kinds),
    ]:
        stem = out / re.sub(r"[^\w.-]", "_", name)
        written += save(figure, numbers, stem, set(runs), notes=differences(frames.origins, runs))
    if not written:
        raise UserError(f"these runs hold nothing to draw for {', '.join(kinds)}: choose among {', '.join(KINDS)}")
    return written


def _of_steps(frames: Frames, kinds: Collection[str]) -> Iterator[Drawn]:
    """Draw what stands over steps, and the times of a step: a figure per training and density, with the dense runs."""
    for (model, dataset, world_size), runs in frames.runs.groupby(TRAINING[:3]):
        is_dense = runs["sparsifier"] == "dense"
        for density in sorted(runs.loc[~is_dense, "density"].unique()) or [1.0]:
            own = frames.of(runs[is_dense | (runs["density"] == density)])
            clusters = " and ".join(sorted(own.runs["cluster"].unique()))
            workers = f"{world_size} workers ({clusters})" if int(str(world_size)) > 1 else "1 worker"
            title = f"{human(str(model))} on {human(str(dataset))}, {workers}, density\N{NO-BREAK SPACE}{density:g}"
            of = f"{model}-{dataset}-n{world_size}-d{density:g}"
            for kind, figure, numbers in _of_one_density(own, kinds, title):
                yield f"{kind}-{of}", figure, numbers, own.runs["run"]


def _of_one_density(frames: Frames, kinds: Collection[str], title: str) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    metric = metric_of(frames.epochs["metric"])
    coloured = leading(frames.epochs, metric)
    chosen = f"; in colour: dense, MiCRO and the best {len(FREE)} others by {metric.name}" if coloured else ""
    numbers = convergence_numbers(frames, metric)
    if "convergence" in kinds and numbers["epoch"].nunique() > 1:  # one point is no curve
        yield "convergence", draw_convergence(numbers, metric, title + chosen, coloured=coloured), numbers
    numbers = time_numbers(frames)
    if "time" in kinds and not numbers.empty:
        yield "time", draw_times(numbers, title), numbers
    numbers = density_numbers(frames.steps)
    if "density" in kinds and not numbers.empty:
        yield "density", draw_steps(numbers, DENSITY, title + chosen, coloured=coloured), numbers
    numbers = residual_numbers(frames.steps)
    if "residual" in kinds and not numbers.empty:
        yield "residual", draw_steps(numbers, RESIDUAL, title + chosen, coloured=coloured), numbers


def _of_forms(frames: Frames, kinds: Collection[str]) -> Iterator[Drawn]:
    """Draw what all runs of one training reached and sent, and the distance to dense over its lengths."""
    runs = run_rows(frames)
    rows = forms(runs)
    for training, own in rows.groupby(TRAINING):
        model, dataset, world_size, epochs = training
        of, title = f"{model}-{dataset}-n{world_size}-e{epochs}", in_words(own)
        named = runs[(runs[TRAINING] == [*training]).all(axis=1)]["run"]
        sparse = own[own["sparsifier"] != "dense"]
        if "methods" in kinds and len(own) > 1 and len(sparse):
            yield f"methods-{of}", draw_forms(own, title), own, named
        if "densities" in kinds and (sparse.groupby(["sparsifier", "form"])["density"].nunique() > 1).any():
            yield f"densities-{of}", draw_by_density(own, title), own, named
        if "bytes" in kinds and len(sparse) and own["bytes_90"].notna().any():
            text = f"Bytes to {metric_of(own['metric']).label}: {title}; hollow: not all seeds came there"
            yield f"bytes-{of}", draw_bytes(own, text), own, named
    several = at_several_lengths(rows[rows["to_dense"].notna()])
    if "lengths" in kinds and not several.empty:
        title = (
            "Distance to dense training of the same length, below 0 worse; each length has its own schedule of rates"
        )
        named = runs.merge(several[[*TRAINING, *FORM]].drop_duplicates(), on=[*TRAINING, *FORM])["run"]
        yield "lengths", draw_lengths(several, title), several, named


def _of_workers(frames: Frames, kinds: Collection[str]) -> Iterator[Drawn]:
    """Draw throughput, over the numbers of real workers."""
    for (model, dataset), runs in frames.runs.groupby(TRAINING[:2]) if "throughput" in kinds else ():
        numbers = throughput_numbers(frames.of(runs))
        if not numbers.empty:
            title = f"{human(str(model))} on {human(str(dataset))}: processes, the same batch on each"
            real = runs.loc[runs["cluster"] != SIMULATED, "run"]
            yield f"throughput-{model}-{dataset}", draw_throughput(numbers, title), numbers, real


def convergence_numbers(frames: Frames, metric: Metric) -> pd.DataFrame:
    """Per method and epoch: num_seeds, mean step, time_s and total_bytes, and the measure with its _min and _max.

    total_bytes is what a worker sent until then. A measure is NaN, not that of fewer seeds, where one is not finite.
    """
    total = frames.steps.groupby("run")["bytes_sent"].cumsum()
    sent = frames.steps[["run"]].assign(step=frames.steps["step"] + 1.0, total_bytes=total).sort_values("step")
    epochs = pd.merge_asof(frames.epochs.sort_values("step"), sent, on="step", by="run")
    by_epoch = epochs.groupby([*METHOD, "epoch"])
    means = by_epoch[["step", "time_s", "total_bytes"]].mean()
    means.insert(0, "num_seeds", by_epoch.size())
    scores = by_epoch[metric.key]
    spread = {"": scores.mean(skipna=False), "_min": scores.min(skipna=False), "_max": scores.max(skipna=False)}
    return means.assign(**{f"{metric.key}{end}": values for end, values in spread.items()}).reset_index()


def density_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Per sparse method, seed and step: target_density, density and density_error, smoothed and thinned to be drawn.

    Each is smoothed by a running median over a hundredth of a run's rows. Steps within a round of local steps, which
    exchange nothing, have none.
    """
    sparse = steps[(steps["sparsifier"] != "dense") & ~steps["skipped"] & steps["density"].notna()]
    smooth = [
        run.rolling(len(run) // 100 | 1, center=True, min_periods=1).median()  # odd: centred on its step
        for _, run in sparse.groupby("run")[[*DENSITY]]
    ]
    return _thinned(sparse.assign(**pd.concat(smooth)) if smooth else sparse, ["target_density", *DENSITY])


def residual_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Per method, seed and step: residual_norm, in the steps in which it was measured; thinned to be drawn."""
    return _thinned(steps[steps["residual_norm"].notna()], [*RESIDUAL])


def _thinned(rows: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Keep every n-th step of those that a method's runs recorded, at most MAX_POINTS; seeds keep the same ones."""
    place = rows.groupby(METHOD)["step"].rank(method="dense") - 1
    keys = [*METHOD, "seed", "step"]
    return rows[place % (place.max() // MAX_POINTS + 1) == 0][[*keys, *columns]].sort_values(keys, ignore_index=True)


def time_numbers(frames: Frames) -> pd.DataFrame:
    """Per method: num_seeds and the mean over seeds of ``stage_times``; runs without an applied step have none."""
    times = frames.runs.set_index("run")[METHOD].join(stage_times(frames.steps), how="inner").groupby(METHOD)
    means = times.mean()
    means.insert(0, "num_seeds", times.size())
    return means.reset_index()


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
    samples = real["world_size"] * real["batch_size"] * real["accumulate"]
    speeds = real.assign(samples_per_s=samples * 1000 / times["total_ms"])
    by_size = speeds.groupby([*METHOD, "density", "world_size"])["samples_per_s"]
    rows = by_size.agg(["size", "mean", "min", "max"]).reset_index().set_axis(columns, axis=1)
    per_worker = rows["samples_per_s"] / rows["world_size"]
    return rows.assign(efficiency=per_worker / per_worker.groupby([rows[key] for key in keys]).transform("first"))


def leading(epochs: pd.DataFrame, metric: Metric) -> Collection[object] | None:
    """Return the methods to be drawn in colour by the mean of the last epoch's measure; None where all are."""
    ends = epochs.groupby("run").tail(1).groupby(METHOD)[metric.key].mean()
    return coloured_methods(ends, higher_is_better=metric.higher_is_better)


@style()
def draw_convergence(
    numbers: pd.DataFrame, metric: Metric, title: str, *, coloured: Collection[object] | None = None
) -> Figure:
    """A measure over steps, over time and over bytes sent. Takes ``convergence_numbers``.

    Bytes are left out where there are none, as with one worker. Of many methods those that are ``coloured`` have
    colour, band and a place in the legend.
    """
    longest = numbers["time_s"].max()
    seconds, unit = (3600, "h") if longest > 2 * 3600 else (60, "min") if longest > 5 * 60 else (1, "s")
    drawn = numbers.assign(time_s=numbers["time_s"] / seconds)
    panels = [
        Panel(x="step", y=metric.key, x_name="step"),
        Panel(x="time_s", y=metric.key, x_name=f"training time ({unit})"),
    ]
    if numbers["total_bytes"].max() > 0:
        panels.append(Panel(x="total_bytes", y=metric.key, x_name="sent per worker", show_x=show_bytes))
    figure = new_figure(PAGE_INCHES, 2.7)
    grid = figure.subplots(1, len(panels), sharey=True)
    lines, handles = _methods(numbers, coloured)
    for axes, panel in zip(grid, panels, strict=True):
        panel.draw(axes, drawn, lines, METHOD)
    show_metric(grid[0].yaxis, metric)
    head(figure, title, handles)
    return figure


@style()
def draw_steps(
    numbers: pd.DataFrame, columns: Mapping[str, str], title: str, *, coloured: Collection[object] | None = None
) -> Figure:
    """Columns over steps, each in a panel with its name: a thin line per seed, a strong one for their mean."""
    figure = new_figure(COLUMN_INCHES, 0.9 + 1.6 * len(columns))
    grid = figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
    lines, handles = _methods(numbers, coloured)
    for axes, (column, name) in zip(grid, columns.items(), strict=True):
        for place, (key, own) in enumerate(numbers.groupby(METHOD)):
            for _, seed in [] if lines[key] is GREY_LINE else own.groupby("seed"):
                axes.plot(seed["step"], seed[column], color=lines[key]["color"], linewidth=0.4, alpha=0.4)
            mean = own.groupby("step")[column].mean()
            every = max(1, len(mean) // 6)
            axes.plot(mean.index, mean, markevery=(place * every // len(MARKERS) % every, every), **lines[key])
        if column == "density":
            target = numbers.groupby("step")["target_density"].first()
            axes.plot(target.index, target, zorder=1.5, **TARGET_LINE)
            handles.append(Line2D([], [], label="target", **TARGET_LINE))
        axes.set_ylabel(name)
        log_with_zero(axes, numbers[column])
    grid[-1].set_xlabel("step")
    head(figure, title, handles)
    return figure


@style()
def draw_throughput(numbers: pd.DataFrame, title: str) -> Figure:
    """Samples per second and scaling efficiency over the number of workers. Takes ``throughput_numbers``."""
    lines, handles = _methods(numbers)
    figure = new_figure(PAGE_INCHES, 2.7)
    left, right = figure.subplots(1, 2)
    by = [*METHOD, "asked_density"]
    speed = Panel(x="world_size", y="samples_per_s", x_name="workers", y_name="samples per second", show_y=plain_log)
    efficiency = Panel(x="world_size", y="efficiency", x_name="workers", y_name="efficiency (%)")
    for axes, panel in ((left, speed), (right, efficiency)):
        panel.draw(axes, numbers, lines, by)
        show_values(axes.xaxis, numbers["world_size"])
    right.axhline(1, **TARGET_LINE)
    right.set_ylim(0, None)
    show_percent(right)
    head(figure, title, [*handles, Line2D([], [], label="linear", **TARGET_LINE)])
    return figure


@style()
def draw_times(numbers: pd.DataFrame, title: str) -> Figure:
    """Stacked bars of the milliseconds of one step, the total at their ends. Takes ``time_numbers``."""
    order = in_order(numbers["sparsifier"])
    rows = numbers.sort_values(METHOD, key=lambda names: names.map(order.index) if names.name == METHOD[0] else names)
    names = [plain(f"{in_legend(*row[METHOD])} (n={row['num_seeds']})") for _, row in rows.iterrows()]
    figure = new_figure(COLUMN_INCHES, 1.1 + 0.22 * len(rows))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for stage, fill in STAGE_FILLS.items():
        axes.barh(names, rows[f"{stage}_ms"], left=left, height=0.65, **fill)
        left += rows[f"{stage}_ms"].to_numpy()
    for place, total in enumerate(rows["total_ms"]):
        axes.annotate(
            three_digits(total), (total, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7
        )
    axes.set(xlabel="time per step (ms)", xlim=(0, 1.16 * rows["total_ms"].max()))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    head(figure, title, [Patch(label=stage, **fill) for stage, fill in STAGE_FILLS.items()])
    return figure


def _methods(numbers: pd.DataFrame, coloured: Collection[object] | None = None) -> tuple[Lines, list[Artist]]:
    """Return the line of each method, one for each of its densities where the numbers have them, and the legend.

    Args:
        coloured: the methods with a colour, the others are grey; None: the first, as far as there are colours.
    """
    keys = [*METHOD, *(["asked_density"] if "asked_density" in numbers else [])]
    order = in_order(numbers["sparsifier"])
    found = sorted(numbers.groupby(keys), key=lambda group: (order.index(str(group[0][0])), *group[0][1:]))
    lines = lines_of(
        [key for key, _ in found], None if coloured is None else [key for key, _ in found if key[:2] in coloured]
    )
    densities = numbers.groupby("sparsifier")[keys[-1]].nunique().to_dict()
    named = {}
    for key, own in found:
        density = f", {key[2]:g}" if key[2:] and densities[key[0]] > 1 else ""
        seeds = own["num_seeds"].max() if "num_seeds" in own else own["seed"].nunique()
        named[f"{in_legend(str(key[0]), str(key[1]))}{density} (n={seeds})"] = lines[key]
    return lines, list(handles_of(named))
