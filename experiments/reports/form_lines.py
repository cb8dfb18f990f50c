"""Figures with a line per form: the measure over density, bytes, workers, rates and lengths of the training."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import (
    draw_band,
    figure_of_panels,
    handles_of,
    head,
    new_figure,
    plain_log,
    show_metric,
    show_values,
)
from experiments.reports.forms import GRADIENTS, goal_of
from experiments.reports.measures import metric_of
from experiments.reports.method_curves import best_methods
from experiments.reports.names import human, in_legend, in_order, label
from experiments.reports.plot_style import (
    DASHES,
    GREY,
    GREY_LINE,
    PAGE_INCHES,
    TARGET_LINE,
    LineSettings,
    lines_of,
    style,
)

SPREAD = "mean and range over seeds"
TRAINING = ["model", "dataset", "world_size"]
Lines = Mapping[tuple[object, ...], LineSettings]


@style()
def draw_by_density(rows: pd.DataFrame, title: str) -> Figure:
    """The measure over the density of the update and over bytes; dense is level.

    Where the rows tell which of them keep up (``with_goal``), a band reaches from dense to what is just level with it.
    """
    metric, is_dense = metric_of(rows["metric"]), rows["sparsifier"] == "dense"
    figure = new_figure(PAGE_INCHES, 3.4)
    panels = figure.subplots(1, 2, sharey=True)
    lines = _lines(rows[~is_dense], ["form"])
    handles: list[Artist] = [*_handles(lines)]
    for (_, row), dashes in zip(rows[is_dense].iterrows(), (TARGET_LINE["linestyle"], *DASHES), strict=False):
        line = TARGET_LINE | {"linestyle": dashes}
        handles.append(Line2D([], [], label=label("dense", str(row["form"])), **line))
        for axes in panels:
            axes.axhline(row["value"], **line)
            if "keeps_up" in rows:
                axes.axhspan(goal_of(row["value"], metric), row["value"], color="0.88", linewidth=0)
    if "keeps_up" in rows:
        handles.append(Patch(label="keeps up", color="0.88", linewidth=0))
    for axes, column in zip(panels, ("measured_density", "total_bytes"), strict=True):
        _draw(axes, rows[~is_dense], column, "value", lines, ["form"])
        plain_log(axes.xaxis)
    panels[0].set_xlabel("density of the update")
    panels[1].set_xlabel("sent by a worker")
    panels[1].xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    show_metric(panels[0].yaxis, metric)
    head(figure, f"{title}: {SPREAD}", handles)
    return figure


@style()
def draw_by_workers(rows: pd.DataFrame, title: str) -> Figure:
    """The measure, density after the exchange and bytes by the number of workers; a line per method."""
    figure = new_figure(PAGE_INCHES, 2.9)
    panels = dict(zip(("value", "measured_density", "batch_bytes"), figure.subplots(1, 3), strict=True))
    lines = _lines(rows, ["form"])
    for column, axes in panels.items():
        _draw(axes, rows, "world_size", column, lines, ["form"])
        show_values(axes.xaxis, rows["world_size"])
        axes.set_xlabel("workers")
    panels["value"].set_ylabel(metric_of(rows["metric"]).label)
    panels["measured_density"].set_ylabel("density after an exchange")
    panels["batch_bytes"].set_ylabel("sent per step and worker")
    plain_log(panels["measured_density"].yaxis)
    plain_log(panels["batch_bytes"].yaxis)
    panels["batch_bytes"].yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    head(figure, f"{title}: {SPREAD}", _handles(lines))
    return figure


@style()
def draw_by_rate(rows: pd.DataFrame, title: str) -> Figure:
    """The measure by the learning rate; a panel for each thing that is exchanged, a line for each form of it."""
    parts = rows["form"].str.partition(", ")
    rows = rows.assign(exchanged=parts[0], form=parts[2])
    by = ["form", "density"] if rows.loc[rows["sparsifier"] != "dense", "density"].nunique() > 1 else ["form"]
    lines = _lines(rows, by)
    kinds = sorted(set(rows["exchanged"]))
    figure, panels = figure_of_panels(kinds, columns=3, height=2.1)
    for kind, axes in panels.items():
        _draw(axes, rows[rows["exchanged"] == kind], "rate", "value", lines, by)
        show_values(axes.xaxis, rows["rate"])
    figure.supxlabel("learning rate of the inner optimizer", fontsize="medium")
    figure.supylabel(metric_of(rows["metric"]).label, fontsize="medium")
    head(figure, title, _handles(lines))
    return figure


def at_several_lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``forms`` whose method ended trainings of several lengths, and their dense rows."""
    is_dense = rows["sparsifier"] == "dense"
    sparse = rows[~is_dense]
    own = [*TRAINING, "density", "sparsifier", "form"]
    several = sparse[sparse.groupby(own)["epochs"].transform("nunique") > 1]
    return pd.concat(
        [rows[is_dense].merge(several[[*TRAINING, "epochs"]].drop_duplicates()), several], ignore_index=True
    )


@style()
def draw_lengths(rows: pd.DataFrame, title: str) -> Figure:
    """How far each form ends from dense over the epochs of the training, a panel per training.

    Takes rows of ``at_several_lengths``. Bands are half the range of the seeds; the grey one is dense's.
    """
    lines = _lines(rows[rows["sparsifier"] != "dense"], ["form", "density"])
    trainings = {
        f"{human(str(key[0]))} on {human(str(key[1]))}, {key[2]} workers": own for key, own in rows.groupby(TRAINING)
    }
    figure, panels = figure_of_panels(list(trainings), columns=3, height=2.0, shared=False)
    for name, axes in panels.items():
        own = trainings[name]
        metric = metric_of(own["metric"])
        scaled = own.assign(value=metric.scale * own["to_dense"], half_range=metric.scale * own["half_range"])
        scaled = scaled.assign(low=scaled["value"] - scaled["half_range"], high=scaled["value"] + scaled["half_range"])
        dense = scaled[scaled["sparsifier"] == "dense"].sort_values("epochs")
        axes.axhline(0, color=GREY, linewidth=0.6)
        axes.fill_between(dense["epochs"], dense["low"], dense["high"], color=GREY, alpha=0.3, linewidth=0)
        _draw(axes, scaled[scaled["sparsifier"] != "dense"], "epochs", "value", lines, ["form", "density"])
        show_values(axes.xaxis, own["epochs"])
        axes.set_xlabel("epochs")
        axes.set_ylabel(metric.column, fontsize=7)
    head(
        figure, title, [*_handles(lines), Patch(label="dense, spread of its seeds", color=GREY, alpha=0.3, linewidth=0)]
    )
    return figure


def _lines(rows: pd.DataFrame, by: list[str]) -> Lines:
    """Return the line of each form: the colour of its method, and dashes for the values that it has in some columns."""
    metric = metric_of(rows["metric"])
    ends = rows.groupby("sparsifier")["value"].agg("max" if metric.higher_is_better else "min")
    of_methods = lines_of(in_order(rows["sparsifier"]), best_methods(ends, metric))
    sparse = rows[rows["sparsifier"] != "dense"]
    kinds = sorted(set(sparse[by].itertuples(index=False, name=None)), key=lambda kind: (kind[0] != GRADIENTS, kind))
    found: dict[tuple[object, ...], LineSettings] = {}
    for method, line in of_methods.items():
        own = set(rows.loc[rows["sparsifier"] == method, by].itertuples(index=False, name=None))
        for place, kind in enumerate([kind for kind in kinds if kind in own] if method != "dense" else sorted(own)):
            number = place if method == "dense" else kinds.index(kind)
            found[method, *kind] = line if line is GREY_LINE else line | {"linestyle": DASHES[number % len(DASHES)]}
    return found


def _handles(lines: Lines) -> list[Line2D]:
    def name(method: object, *kind: object) -> str:
        words = [f"{word:g}" if isinstance(word, float) else str(word) for word in kind if word not in ("", 1.0)]
        return ", ".join([in_legend(str(method)), *words])

    return handles_of({name(*key): line for key, line in lines.items()})


def _draw(axes: Axes, rows: pd.DataFrame, x: str, y: str, lines: Lines, by: list[str]) -> None:
    """Draw each form's line over a column, with the range of its seeds where it is of the measure."""
    for key, own in rows.groupby(["sparsifier", *by]):
        own = own.sort_values(x)
        low, high = (own["low"], own["high"]) if y == "value" else (own[y], own[y])
        draw_band(axes, own[x], own[y], low, high, lines[key])
