"""Draw all figures that a set of finished runs allows, with their numbers: over steps, of times, of forms."""

import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.config.errors import UserError
from experiments.config.networks import load_network
from experiments.config.schema import SIMULATED
from experiments.reports import figure_parts as parts
from experiments.reports import plot_style as look
from experiments.reports.figure_parts import Lines, Panel, figure_of_lines, head, save
from experiments.reports.form_figures import draw_by_density, draw_bytes, draw_forms, draw_lengths, lines_of_forms
from experiments.reports.forms import (
    FORM,
    TRAINING,
    at_several_lengths,
    forms_of,
    in_words,
    model_in_words,
    seconds_on_link,
    sign_of,
    with_settings,
)
from experiments.reports.frames import METHOD, STAGES, Frames
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import KINDS, human, in_legend, in_order
from experiments.reports.plot_style import LineSettings, style
from experiments.reports.provenance import differences
from experiments.reports.table import points
from experiments.reports.times import stage_times

MAX_POINTS = 400  # of one line; more cannot be seen and makes the PDF heavy
LONGEST_NAME = 30  # letters of a row in a figure of one column
ON = "on_"  # begins the columns of seconds on a link
DENSITY = {"density": "density", "local_density": "chosen by rank 0", "density_error": "density error"}
RESIDUAL = {"residual_norm": "norm of the residual"}
SPLIT = ("forward", "backward", *STAGES[1:])  # stages where the two parts of computation are known
STAGE_FILLS: dict[str, LineSettings] = {
    stage: {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
    for stage, color, hatch in zip(
        (*SPLIT, "compute"),
        (look.SKY, look.BLUE, look.VERMILLION, look.GREEN, "#dddddd", look.SKY),
        ("", "", "////", "....", "", ""),
        strict=True,
    )
}
Drawn = tuple[str, Figure, pd.DataFrame, pd.Series]
"""A figure: the name of its files, itself, the numbers that are in it, and the runs that these are of."""


def draw_all(
    frames: Frames, out: Path, kinds: Collection[str] = KINDS, links: Sequence[str] = ("ethernet_10gbit",)
) -> list[Path]:
    """Draw and write every figure of these kinds that the runs allow; returns the paths written.

    Below a figure stands in what the origins of its runs differ.

    Args:
        links: networks of conf/networks.yaml, on which the time of simulated workers is drawn.

    Raises:
        UserError: the runs allow none, or no such network.
    """
    written = []
    timed = replace(frames, epochs=with_link_times(frames, links)) if "convergence" in kinds else frames
    drawn = chain(_of_steps(timed, kinds), _of_forms(frames, kinds), _of_workers(frames, kinds))
    for name, figure, numbers, runs in drawn:
        stem = out / re.sub(r"[^\w.-]", "_", name)
        own = frames.runs[frames.runs["run"].isin(runs)]
        written += save(figure, numbers, stem, own["run"], notes=differences(own))
    if not written:
        raise UserError(f"these runs hold nothing to draw for {', '.join(kinds)}: choose among {', '.join(KINDS)}")
    return written


def _of_steps(frames: Frames, kinds: Collection[str]) -> Iterator[Drawn]:
    """Draw what stands over steps, and the times of a step: a figure per training and density.

    Runs that send every element, dense ones and those of quantisers, stand in each.
    """
    for (model, dataset, world_size), runs in frames.runs.groupby(TRAINING[:3]):
        is_whole = runs["density"] == 1
        for density in sorted(runs.loc[~is_whole, "density"].unique()) or [1.0]:
            own = frames.of(runs[is_whole | (runs["density"] == density)])
            clusters = " and ".join(sorted(own.runs["cluster"].unique()))
            workers = f"{world_size} workers ({clusters})" if int(str(world_size)) > 1 else "1 worker"
            name = model_in_words(own.runs.iloc[0])
            title = f"{name} on {human(str(dataset))}, {workers}, density\N{NO-BREAK SPACE}{density:g}"
            ends = last_values(own.epochs)
            if look.coloured_methods(ends):
                name = metric_of(own.epochs["metric"]).name
                title += f"; in colour: dense, MiCRO and the best {len(look.FREE)} others by {name}"
            for kind, draw in OF_STEPS.items():
                if kind in kinds and (made := draw(own, title, ends)):
                    yield f"{kind}-{model}-{dataset}-n{world_size}-d{density:g}", *made, own.runs["run"]


def _of_forms(frames: Frames, kinds: Collection[str]) -> Iterator[Drawn]:
    """Draw what all runs of one training reached and sent, and the distance to dense over its lengths."""
    runs, rows = forms_of(frames)
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


def last_values(epochs: pd.DataFrame) -> pd.Series:
    """Return the best mean, over the seeds of one form, of what each method ends with; more is better."""
    metric = metric_of(epochs["metric"])
    ends = epochs.groupby("run").tail(1).groupby(METHOD)[metric.key].mean() * sign_of(metric.key)
    return ends.groupby(level=0).max()


def with_link_times(frames: Frames, links: Sequence[str]) -> pd.DataFrame:
    """Return the epochs of runs with the seconds until then on each link, a column ON and its name.

    A run of simulated workers computed for all of them in turn; on a link each computes for itself, and messages of
    the run's bytes follow one after the other. Choosing what to send is left out.
    """
    found = points(with_settings(forms_of(frames)[0]))
    for name in links:
        networks = {n: load_network(name).link_of(max(2, n)) for n in found["world_size"].unique()}
        for n, link in networks.items():
            own = found["world_size"] == n
            found.loc[own, f"{ON}{name}"] = seconds_on_link(found[own], link)
    times = found[["run", "step", *(f"{ON}{name}" for name in links)]].drop_duplicates(["run", "step"])
    return frames.epochs.merge(times, on=["run", "step"], how="left")


def convergence_numbers(frames: Frames) -> pd.DataFrame:
    """Per method and epoch: num_seeds, mean step, seconds and total_bytes, and the measure with its _min and _max.

    total_bytes is what a worker sent until then; the seconds are time_s, and of simulated workers those on links (see
    ``with_link_times``). A measure is NaN, not that of fewer seeds, where one is not finite.
    """
    key = metric_of(frames.epochs["metric"]).key
    total = frames.steps.groupby("run")["bytes_sent"].cumsum()
    sent = frames.steps[["run"]].assign(step=frames.steps["step"] + 1.0, total_bytes=total).sort_values("step")
    epochs = pd.merge_asof(frames.epochs.sort_values("step"), sent, on="step", by="run")
    by_epoch = epochs.groupby([*METHOD, "epoch"])
    links = [str(name) for name in epochs if str(name).startswith(ON)]
    is_simulated = links and (epochs["cluster"] == SIMULATED).all()
    means = by_epoch[["step", *(links if is_simulated else ["time_s"]), "total_bytes"]].mean()
    means.insert(0, "num_seeds", by_epoch.size())
    scores = by_epoch[key]
    spread = {"": scores.mean(skipna=False), "_min": scores.min(skipna=False), "_max": scores.max(skipna=False)}
    return means.assign(**{f"{key}{end}": values for end, values in spread.items()}).reset_index()


def density_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Per sparse method, seed and step: target_density and the columns DENSITY, smoothed and thinned to be drawn.

    Each is smoothed by a running median over a hundredth of a run's rows. Steps within a round of local steps, which
    exchange nothing, have none.
    """
    is_sparse = steps.groupby("run")["target_density"].transform("min") < 1
    sparse = steps[is_sparse & ~steps["skipped"] & steps["density"].notna()]
    smooth = [
        run.rolling(len(run) // 100 | 1, center=True, min_periods=1).median()  # odd: centred on its step
        for _, run in sparse.groupby("run")[[*DENSITY]]
    ]
    return _thinned(sparse.assign(**pd.concat(smooth)) if smooth else sparse, ["target_density", *DENSITY])


def _thinned(rows: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Keep every n-th step of those that a method's runs recorded, at most MAX_POINTS; seeds keep the same ones."""
    place = rows.groupby(METHOD)["step"].rank(method="dense") - 1
    keys = [*METHOD, "seed", "step"]
    return rows[place % (place.max() // MAX_POINTS + 1) == 0][[*keys, *columns]].sort_values(keys, ignore_index=True)


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


@style()
def draw_convergence(numbers: pd.DataFrame, title: str, ends: pd.Series) -> Figure:
    """A measure over steps, over time and over bytes sent, which are left out where there are none.

    Takes ``convergence_numbers``. Of many methods those that ended best have colour, band and a place in the legend.
    """
    metric = metric_of(numbers.columns)
    first = Panel(x="step", y=metric.key, x_name="step", show_y=partial(parts.show_metric, metric=metric))
    if top := _most_shown(numbers, metric):
        title += f"; beyond {metric.format(top)} nothing is drawn"
        first = replace(first, also=lambda axes, _: axes.set_ylim(top=top))
    panels = [first]
    for column in (name for name in map(str, numbers) if name == "time_s" or name.startswith(ON)):
        longest, link = numbers[column].max(), column.removeprefix(ON)
        seconds, unit = (3600, "h") if longest > 2 * 3600 else (60, "min") if longest > 5 * 60 else (1, "s")
        name = f"training time ({unit})" if link == column else f"time at {human(link)} ({unit}),\ncomputed"
        panels.append(Panel(x=column, y=metric.key, x_name=name))
        numbers = numbers.assign(**{column: numbers[column] / seconds})
    if numbers["total_bytes"].max() > 0:
        panels.append(Panel(x="total_bytes", y=metric.key, x_name="sent per worker", show_x=parts.show_bytes))
    return figure_of_lines(title, numbers, panels, _lines(numbers, ends), height=2.8)


def _most_shown(numbers: pd.DataFrame, metric: Metric) -> float:
    """Return where the axis of a measure ends that one method's values would fill alone; 0: it shows all."""
    worst = numbers.groupby(METHOD)[f"{metric.key}_max"].max()
    top = float(2 * worst.median())
    return top if not metric.higher_is_better and worst.max() > top else 0.0


@style()
def draw_steps(numbers: pd.DataFrame, columns: Mapping[str, str], title: str, ends: pd.Series) -> Figure:
    """Columns over steps, each in a panel with its name: a thin line per seed, a strong one for their mean."""
    figure = parts.new_figure(look.COLUMN_INCHES, 0.9 + 1.6 * len(columns))
    grid = figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
    lines = _lines(numbers, ends)
    handles = [*lines.handles]
    for axes, (column, name) in zip(grid, columns.items(), strict=True):
        means = [own.groupby("step")[column].mean() for _, own in numbers.groupby(METHOD)]
        widths = parts.widths_of([mean.reset_index() for mean in means])
        for place, (key, own) in enumerate(numbers.groupby(METHOD)):
            for _, seed in [] if lines.of[key] is look.GREY_LINE else own.groupby("seed"):
                axes.plot(seed["step"], seed[column], color=lines.of[key]["color"], linewidth=0.4, alpha=0.4)
            mean, every = means[place], max(1, len(means[place]) // 6)
            marks = {"markevery": (place * every // len(look.MARKERS) % every, every), "linewidth": widths[place]}
            axes.plot(mean.index, mean, **(lines.of[key] if lines.of[key] is look.GREY_LINE else lines.of[key] | marks))
        if column != "density_error" and column in DENSITY:
            for _, own in numbers.groupby(METHOD):  # forms may have targets of their own, as with a warm-up
                target = own.groupby("step")["target_density"].first()
                axes.plot(target.index, target, zorder=1.5, **look.TARGET_LINE)
            handles += [Line2D([], [], label="target", **look.TARGET_LINE)] if column == "density" else []
        axes.set_ylabel(name)
        parts.log_with_zero(axes, numbers[column])
    grid[-1].set_xlabel("step")
    head(figure, title, handles)
    return figure


@style()
def draw_throughput(numbers: pd.DataFrame, title: str) -> Figure:
    """Samples per second and scaling efficiency over the number of workers. Takes ``throughput_numbers``."""

    def draw_linear(axes: Axes, _rows: pd.DataFrame) -> None:
        axes.axhline(1, **look.TARGET_LINE)
        axes.set_ylim(0, None)
        parts.show_percent(axes)

    lines = _lines(numbers, numbers.groupby("sparsifier")["samples_per_s"].max(), [*METHOD, "asked_density"])
    workers = Panel(x="world_size", x_name="workers", show_x=partial(parts.show_values, values=numbers["world_size"]))
    panels = [
        replace(workers, y="samples_per_s", y_name="samples per second", show_y=parts.plain_log),
        replace(workers, y="efficiency", y_name="efficiency (%)", also=draw_linear),
    ]
    linear = Line2D([], [], label="linear", **look.TARGET_LINE)
    return figure_of_lines(title, numbers, panels, lines, [linear], height=2.7, sharey=False)


@style()
def draw_times(numbers: pd.DataFrame, title: str) -> Figure:
    """Stacked bars of the milliseconds of one step, at their ends the total, and its range over seeds as a line."""
    order = in_order(numbers["sparsifier"])
    rows = numbers.sort_values(METHOD, key=lambda names: names.map(order.index) if names.name == METHOD[0] else names)
    names = [look.plain(f"{in_legend(*row[METHOD])} (n={row['num_seeds']})") for _, row in rows.iterrows()]
    is_long = max(map(len, names)) > LONGEST_NAME
    names = [textwrap.fill(name, parts.LONGEST_LINE) for name in names]
    row_inches = max(0.22, 0.13 * max(name.count("\n") + 1 for name in names))
    figure = parts.new_figure(look.PAGE_INCHES if is_long else look.COLUMN_INCHES, 1.1 + row_inches * len(rows))
    axes = figure.subplots()
    fills = {stage: STAGE_FILLS[stage] for stage in (SPLIT if rows["forward_ms"].all() else STAGES)}
    rows = rows.assign(backward_ms=rows["compute_ms"] - rows["forward_ms"])
    spread = rows[["total_ms_min", "total_ms_max"]].sub(rows["total_ms"], axis=0).abs().to_numpy().T
    parts.draw_stacks(axes, rows, {f"{stage}_ms": fill for stage, fill in fills.items()}, spread)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="time per step (ms)", xlim=(0, 1.16 * rows["total_ms_max"].max()))
    axes.invert_yaxis()
    head(figure, title, [Patch(label=stage, **fill) for stage, fill in fills.items()])
    return figure


def _lines(numbers: pd.DataFrame, ends: pd.Series, by: Sequence[str] = METHOD) -> Lines:
    """Return the line of each form, with the number of its seeds in the legend."""
    own = numbers.groupby([*by])
    seeds = own["num_seeds"].max() if "num_seeds" in numbers else own["seed"].nunique()
    return lines_of_forms(numbers, by, ends, seeds)


Made = tuple[Figure, pd.DataFrame]


def _convergence(frames: Frames, title: str, ends: pd.Series) -> Made | None:
    numbers = convergence_numbers(frames)
    return (draw_convergence(numbers, title, ends), numbers) if numbers["epoch"].nunique() > 1 else None


def _times(frames: Frames, title: str, ends: pd.Series) -> Made | None:
    times = frames.runs.set_index("run")[METHOD].join(stage_times(frames.steps), how="inner").groupby(METHOD)
    numbers, totals = times.mean(), times["total_ms"]
    numbers = numbers.assign(total_ms_min=totals.min(), total_ms_max=totals.max())
    numbers.insert(0, "num_seeds", times.size())
    numbers = numbers.reset_index()
    return (draw_times(numbers, title.partition(";")[0]), numbers) if len(numbers) else None


def _density(frames: Frames, title: str, ends: pd.Series) -> Made | None:
    numbers = density_numbers(frames.steps)
    chosen = (numbers["local_density"] / numbers["target_density"] - 1).abs().max()
    known = {column: name for column, name in DENSITY.items() if column != "local_density" or chosen > 0.01}
    return (draw_steps(numbers, known, title, ends), numbers) if len(numbers) else None


def _residual(frames: Frames, title: str, ends: pd.Series) -> Made | None:
    numbers = _thinned(frames.steps[frames.steps["residual_norm"].notna()], [*RESIDUAL])
    return (draw_steps(numbers, RESIDUAL, title, ends), numbers) if len(numbers) else None


OF_STEPS: dict[str, Callable[[Frames, str, pd.Series], Made | None]] = {
    "convergence": _convergence,
    "time": _times,
    "density": _density,
    "residual": _residual,
}
