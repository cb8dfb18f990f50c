"""Draw figures with a line or row per form: the measure over density, bytes, workers, rates and lengths."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.reports import figure_parts as parts
from experiments.reports import plot_style as look
from experiments.reports.figure_parts import Key, Lines, Panel, figure_of_lines, head
from experiments.reports.forms import (
    FORM,
    GRADIENTS,
    SHARES,
    TRAINING,
    at_best_rate,
    at_several_lengths,
    goal_of,
    in_words,
    loss_curves,
    sign_of,
    with_goal,
)
from experiments.reports.measures import metric_of
from experiments.reports.names import in_legend, in_order
from experiments.reports.plot_style import LineSettings, style

SPREAD = "mean and range over seeds"
RING: LineSettings = {"marker": "o", "markersize": 3.0, "markerfacecolor": "none", "markeredgewidth": 0.6}
MARKS = dict(zip([f"{100 * share:g}" for share in SHARES], "osD", strict=True))  # percent of dense's end
NUM_LOSSES = 8  # lines in the figure of losses


@style()
def draw_by_density(rows: pd.DataFrame, title: str) -> Figure:
    """The measure over the density of the update and over bytes; dense is level.

    Where the rows tell which of them keep up (``with_goal``), a band reaches from dense to what is just level with it.
    """
    metric, is_dense = metric_of(rows["metric"]), rows["sparsifier"] == "dense"
    lines = _lines(rows[~is_dense])
    dashes = (look.TARGET_LINE["linestyle"], *look.DASHES)
    dense = [
        (row, look.TARGET_LINE | {"linestyle": dash})
        for (_, row), dash in zip(rows[is_dense].iterrows(), dashes, strict=False)
    ]
    handles: list[Artist] = [Line2D([], [], label=in_legend("dense", row["form"]), **line) for row, line in dense]
    if "keeps_up" in rows:
        handles.append(Patch(label="keeps up", color="0.88", linewidth=0))

    def draw_dense(axes: Axes, _rows: pd.DataFrame) -> None:
        for row, line in dense:
            axes.axhline(row["value"], **line)
            if "keeps_up" in rows:
                axes.axhspan(goal_of(row["value"], metric), row["value"], color="0.88", linewidth=0)

    panel = Panel(x="measured_density", x_name="density of the update", show_x=parts.plain_log, also=draw_dense)
    panels = [
        replace(panel, show_y=partial(parts.show_metric, metric=metric)),
        replace(panel, x="total_bytes", x_name="sent by a worker", show_x=parts.show_bytes),
    ]
    return figure_of_lines(f"{title}: {SPREAD}", rows[~is_dense], panels, lines, handles, height=3.4)


@style()
def draw_by_workers(rows: pd.DataFrame, title: str) -> Figure:
    """The measure, density after the exchange and bytes by the number of workers; a line per method."""
    lines = _lines(rows)
    panel = Panel(x="world_size", x_name="workers", show_x=partial(parts.show_values, values=rows["world_size"]))
    panels = [
        replace(panel, y_name=metric_of(rows["metric"]).label),
        replace(panel, y="measured_density", y_name="density after an exchange", show_y=parts.plain_log),
        replace(panel, y="batch_bytes", y_name="sent per step and worker", show_y=parts.show_bytes),
    ]
    return figure_of_lines(f"{title}: {SPREAD}", rows, panels, lines, height=2.9, sharey=False)


@style()
def draw_by_rate(rows: pd.DataFrame, title: str) -> Figure:
    """The measure by the learning rate; a panel for each thing that is exchanged, a line for each form of it."""
    exchanged = rows["form"].str.partition(", ")
    rows = rows.assign(exchanged=exchanged[0], form=exchanged[2])
    several = rows.loc[rows["sparsifier"] != "dense", "density"].nunique() > 1
    lines = _lines(rows, ["sparsifier", "form", *(["density"] if several else [])])
    figure, panels = parts.figure_of_panels(sorted(set(rows["exchanged"])), columns=3, height=2.1)
    for kind, axes in panels.items():
        Panel(x="rate").draw(axes, rows[rows["exchanged"] == kind], lines)
        parts.show_values(axes.xaxis, rows["rate"])
    figure.supxlabel("learning rate of the inner optimizer", fontsize="medium")
    figure.supylabel(metric_of(rows["metric"]).label, fontsize="medium")
    head(figure, title, lines.handles)
    return figure


@style()
def draw_lengths(rows: pd.DataFrame, title: str) -> Figure:
    """How far each form ends from dense over the epochs of the training, a panel per training.

    Takes rows of ``at_several_lengths``. Bands are half the range of the seeds; the grey one is dense's.
    """
    lines = _lines(rows[rows["sparsifier"] != "dense"], ["sparsifier", "form", "density"])
    trainings = {in_words(own): own for _, own in rows.groupby(TRAINING[:3])}
    figure, panels = parts.figure_of_panels(list(trainings), columns=3, height=2.0, shared=False)
    shade: LineSettings = {"color": look.GREY, "alpha": 0.3, "linewidth": 0}
    for name, axes in panels.items():
        metric = metric_of(trainings[name]["metric"])
        away, room = (metric.scale * trainings[name][column] for column in ("to_dense", "half_range"))
        own = trainings[name].assign(value=away, low=away - room, high=away + room)
        dense = own.query("sparsifier == 'dense'").sort_values("epochs")
        axes.axhline(0, color=look.GREY, linewidth=0.6)
        axes.fill_between(dense["epochs"], dense["low"], dense["high"], **shade)
        Panel(x="epochs", x_name="epochs", y_name=metric.column).draw(axes, own.query("sparsifier != 'dense'"), lines)
        parts.show_values(axes.xaxis, own["epochs"])
        axes.yaxis.label.set_fontsize(7)
    head(figure, title, [*lines.handles, Patch(label="dense, spread of its seeds", **shade)])
    return figure


@style()
def draw_losses(numbers: pd.DataFrame, rows: pd.DataFrame, title: str) -> Figure:
    """Loss on the test set over tokens, bytes and seconds on links, a line per form with a mark at its end.

    At most NUM_LOSSES forms of the shortest training with the fewest workers are drawn: dense at every step, MiCRO's
    best, and the best others.

    Args:
        numbers: of ``loss_curves``.
        rows: of ``forms``, the best first.
    """
    by = [*TRAINING, *FORM]
    known = rows.merge(numbers[by].drop_duplicates(), on=by)
    known = known[(known["epochs"] == known["epochs"].min()) & (known["world_size"] == known["world_size"].min())]
    is_first = (known["sparsifier"] == "dense") & (known["form"] == GRADIENTS)
    is_first |= known.index.isin(known.index[known["sparsifier"] == "micro"][:1])
    chosen = pd.concat([known[is_first], known[~is_first]])[:NUM_LOSSES]
    drawn = numbers.merge(chosen[by], on=by)
    keys = ["sparsifier", "form", "rate", "density"]
    lines = _lines(chosen, keys, drawn.groupby(keys)["num_seeds"].first(), named=1)
    panel = Panel(x="tokens", y="test_loss", x_name="tokens of all workers", show_x=_show_thousands)
    panel = replace(panel, y_name="loss on the test set")
    panels = [panel, replace(panel, x="bytes", x_name="sent by a worker", y_name="", show_x=parts.show_bytes)]
    panel = replace(panel, show_x=parts.plain_log)
    panels.append(replace(panel, x="at_100mbit_ms", x_name="seconds at 100 Mbit/s, simulated"))
    panels.append(replace(panel, x="at_1gbit_ms", x_name="seconds at 1 Gbit/s, simulated", y_name=""))
    title += f"; dense, MiCRO's best and the best others of {len(rows)} forms" if len(chosen) < len(rows) else ""
    return figure_of_lines(title, drawn, panels, lines, height=5.0, num_rows=2, markevery=[-1])


@style()
def draw_forms(rows: pd.DataFrame, title: str) -> Figure:
    """A row per form, the best on top: the measure, and the bytes sent.

    Of a form that was tried at several rates the best is drawn with the range of its seeds, the others as rings.
    """
    metric, best = metric_of(rows["metric"]), at_best_rate(rows)
    figure, (left, right) = parts.figure_of_rows(_names(best, with_rate=rows["rate"].nunique() > 1), 2)
    for height, (_, row) in enumerate(best.iterrows()):
        color = look.highlight(row["sparsifier"])
        others = rows[(rows[FORM[:3]] == row[FORM[:3]]).all(axis=1) & (rows["rate"] != row["rate"])]
        left.plot(others["value"], [height] * len(others), color=color, linestyle="none", **RING)
        _draw_range(left, height, row, color)
        right.plot(row["total_bytes"], height, color=color, marker="o")
    handles = []
    dense = best.loc[best["sparsifier"] == "dense", "value"].dropna()
    if len(dense):
        left.axvline(dense.max() if metric.higher_is_better else dense.min(), **look.TARGET_LINE)
        handles.append(Line2D([], [], label="dense, at the best of its rates", **look.TARGET_LINE))
    if len(rows) > len(best):
        handles.append(Line2D([], [], label="the form at its other rates", color=look.BLACK, linestyle="none", **RING))
    parts.show_metric(left.xaxis, metric)
    right.set_xlabel("sent by a worker")
    parts.show_bytes(right.xaxis, most=3)
    head(figure, f"{title}: {SPREAD}", handles)
    return figure


@style()
def draw_by_epochs(rows: pd.DataFrame, title: str) -> Figure:
    """A row per form, and a mark with its range per length of the training and number of workers."""
    named = rows.assign(name=[f"{in_legend(row['sparsifier'])}, {row['form']}" for _, row in rows.iterrows()])
    names = list(named.sort_values(["epochs", "value"]).drop_duplicates("name")["name"])
    figure, (axes,) = parts.figure_of_rows(names)
    handles = []
    for ((epochs, workers), own), color in zip(named.groupby(["epochs", "world_size"]), look.PALETTE, strict=False):
        for _, row in own.iterrows():
            _draw_range(axes, names.index(row["name"]), row, color)
        length = "1 pass" if epochs == 1 else f"{epochs} passes"
        text = f"{length}, {workers} workers (n={own['num_seeds'].max():g})"
        handles.append(Line2D([], [], label=text, color=color, marker="o", linestyle="none"))
    axes.set_xlabel(metric_of(rows["metric"]).label)
    head(figure, f"{title}: {SPREAD}", handles)
    return figure


@style()
def draw_bytes(rows: pd.DataFrame, title: str) -> Figure:
    """A row per form, the fewest bytes on top: what a worker had sent when it came to shares of dense's end.

    A mark is full where all seeds came there, hollow where some did, and missing where none did.
    """
    rows = rows.sort_values([f"bytes_{share}" for share in MARKS], na_position="last")
    figure, (axes,) = parts.figure_of_rows(_names(rows, with_rate=False))
    for height, (_, row) in enumerate(rows.iterrows()):
        color = look.highlight(row["sparsifier"])
        axes.plot([row[f"bytes_{share}"] for share in MARKS], [height] * len(MARKS), color=color, linewidth=0.6)
        for share, marker in MARKS.items():
            face = color if row[f"num_{share}"] == row["num_seeds"] else "white"
            axes.plot(row[f"bytes_{share}"], height, color=color, marker=marker, markerfacecolor=face)
        if pd.isna([row[f"bytes_{share}"] for share in MARKS]).all():
            axes.text(0.01, height, "came to none", transform=axes.get_yaxis_transform(), va="center", fontsize=7)
    axes.set_xlabel("sent by a worker until then")
    parts.show_bytes(axes.xaxis)
    marks: LineSettings = {"color": look.BLACK, "linestyle": "none"}
    handles = [
        Line2D([], [], label=f"{share} % of dense's end", marker=marker, **marks) for share, marker in MARKS.items()
    ]
    head(figure, title, handles)
    return figure


def lines_of_forms(
    rows: pd.DataFrame, by: Sequence[str], ends: pd.Series, seeds: pd.Series | None = None, named: int | None = None
) -> Lines:
    """Return the line of each form, and the legend: the colour of its method, dashes for what else tells forms apart.

    Args:
        by: columns, the method first.
        ends: how good each method was: of many the best have colours.
        seeds: how many each form has, said in the legend.
        named: how many of the columns after the method the legend names; None: all.
    """
    methods = in_order(rows["sparsifier"])
    of_methods = look.lines_of(methods, look.coloured_methods(ends))
    keys = set(rows[[*by]].itertuples(index=False, name=None))
    alone = look.lines_of(sorted(keys)) if len(methods) == 1 else {}  # of one method each form has a colour
    kinds = sorted({key[1:] for key in keys}, key=lambda kind: (kind[0] != GRADIENTS, kind))
    of_sparse = [kind for kind in kinds if any(key[0] != "dense" and key[1:] == kind for key in keys)]
    lines, names = dict[Key, LineSettings](), dict[str, LineSettings]()
    for method in methods:
        line, own = of_methods[method], [kind for kind in kinds if (method, *kind) in keys]
        places = own if method == "dense" or len(of_sparse) > len(look.DASHES) else of_sparse
        for kind in own:
            turn, dashes = divmod(places.index(kind), len(look.DASHES))
            if (method, *kind) in alone:
                line = alone[method, *kind]
            elif line is not look.GREY_LINE:
                line = of_methods[method] | {"linestyle": look.DASHES[dashes]}
                line |= {"marker": look.MARKERS[-turn]} if turn else {}
            lines[method, *kind] = line
            words = [f"{word:g}" if isinstance(word, float) else word for word in kind[:named] if word not in ("", 1.0)]
            of_seeds = "" if seeds is None else f" (n={seeds[method, *kind]})"
            names[", ".join([in_legend(method), *words]) + of_seeds] = line
    return Lines(by=by, of=lines, handles=parts.handles_of(names))


def _lines(
    rows: pd.DataFrame,
    by: Sequence[str] = ("sparsifier", "form"),
    seeds: pd.Series | None = None,
    named: int | None = None,
) -> Lines:
    gain = rows["value"] * rows["metric"].map(sign_of)
    return lines_of_forms(rows, by, gain.groupby(rows["sparsifier"]).max(), seeds, named)


def _draw_range(axes: Axes, height: int, row: pd.Series, color: str) -> None:
    axes.hlines(height, row["low"], row["high"], color=color, linewidth=0.8)
    axes.plot(row["value"], height, color=color, marker="o")


def _names(rows: pd.DataFrame, *, with_rate: bool) -> list[str]:
    """Return what each form is called, with its density where there are several, and its rate."""
    several = rows.loc[rows["sparsifier"] != "dense", "density"].nunique() > 1
    names = []
    for _, row in rows.iterrows():
        density = f", {row['density']:g}" if several and row["density"] < 1 else ""
        best = f", best of {row['trials']}" if row["trials"] > 1 else ""
        rate = f", rate {row['rate']:g}{best}" if with_rate else ""
        names.append(in_legend(row["sparsifier"], row["form"]) + density + rate)
    return names


def _show_thousands(axis: XAxis | YAxis) -> None:
    axis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")


def drawn(kind: str, rows: pd.DataFrame, runs: pd.DataFrame, title: str) -> tuple[Figure, pd.DataFrame]:
    """Return a figure of KINDS and its numbers, from rows of ``forms`` and those of the table of runs behind them."""
    if kind == "curves":
        numbers = loss_curves(runs)
        return draw_losses(numbers, rows.sort_values("to_dense", ascending=False), title), numbers
    draw, choose = KINDS[kind]
    chosen = choose(rows) if choose else rows
    return draw(chosen, title), chosen


Draw = Callable[[pd.DataFrame, str], Figure]
KINDS: dict[str, tuple[Draw, Callable[[pd.DataFrame], pd.DataFrame] | None]] = {  # that a page may have, beside curves
    "forms": (draw_forms, None),
    "keep_up": (draw_by_density, with_goal),
    "bytes": (draw_bytes, None),
    "lengths": (draw_lengths, at_several_lengths),
    "density": (draw_by_density, None),
    "workers": (draw_by_workers, None),
    "rates": (draw_by_rate, None),
    "epochs": (draw_by_epochs, None),
}
