"""Figures with a line or a row per form: the measure over density, bytes, workers, rates and lengths."""

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.reports.figure_parts import (
    Key,
    Lines,
    Panel,
    Show,
    figure_of_panels,
    handles_of,
    head,
    new_figure,
    plain_log,
    show_bytes,
    show_metric,
    show_values,
)
from experiments.reports.forms import (
    FORM,
    GRADIENTS,
    SHARES,
    TRAINING,
    at_best_rate,
    at_several_lengths,
    goal_of,
    loss_curves,
    with_goal,
)
from experiments.reports.measures import metric_of
from experiments.reports.names import human, in_legend, in_order
from experiments.reports.plot_style import (
    BLACK,
    DASHES,
    GREY,
    GREY_LINE,
    MARKERS,
    PAGE_INCHES,
    PALETTE,
    TARGET_LINE,
    LineSettings,
    coloured_methods,
    highlight,
    lines_of,
    plain,
    style,
)

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
    lines = _lines_of_forms(rows[~is_dense], ["form"])
    handles = _handles_of_forms(lines)
    figure = new_figure(PAGE_INCHES, 3.4)
    grid = figure.subplots(1, 2, sharey=True)
    panels = [
        Panel(x="measured_density", x_name="density of the update", show_x=plain_log),
        Panel(x="total_bytes", x_name="sent by a worker", show_x=show_bytes),
    ]
    for axes, panel in zip(grid, panels, strict=True):
        panel.draw(axes, rows[~is_dense], lines, ["sparsifier", "form"])
    for (_, row), dashes in zip(rows[is_dense].iterrows(), (TARGET_LINE["linestyle"], *DASHES), strict=False):
        line = TARGET_LINE | {"linestyle": dashes}
        handles.append(Line2D([], [], label=in_legend("dense", str(row["form"])), **line))
        for axes in grid:
            axes.axhline(row["value"], **line)
            if "keeps_up" in rows:
                axes.axhspan(goal_of(row["value"], metric), row["value"], color="0.88", linewidth=0)
    if "keeps_up" in rows:
        handles.append(Patch(label="keeps up", color="0.88", linewidth=0))
    show_metric(grid[0].yaxis, metric)
    head(figure, f"{title}: {SPREAD}", handles)
    return figure


@style()
def draw_by_workers(rows: pd.DataFrame, title: str) -> Figure:
    """The measure, density after the exchange and bytes by the number of workers; a line per method."""
    columns: dict[str, tuple[str, Show]] = {
        "value": (metric_of(rows["metric"]).label, lambda axis: None),
        "measured_density": ("density after an exchange", plain_log),
        "batch_bytes": ("sent per step and worker", show_bytes),
    }
    lines = _lines_of_forms(rows, ["form"])
    figure = new_figure(PAGE_INCHES, 2.9)
    for axes, (column, (name, show)) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        panel = Panel(x="world_size", y=column, x_name="workers", y_name=name, show_y=show)
        panel.draw(axes, rows, lines, ["sparsifier", "form"])
        show_values(axes.xaxis, rows["world_size"])
    head(figure, f"{title}: {SPREAD}", _handles_of_forms(lines))
    return figure


@style()
def draw_by_rate(rows: pd.DataFrame, title: str) -> Figure:
    """The measure by the learning rate; a panel for each thing that is exchanged, a line for each form of it."""
    parts = rows["form"].str.partition(", ")
    rows = rows.assign(exchanged=parts[0], form=parts[2])
    by = ["form", "density"] if rows.loc[rows["sparsifier"] != "dense", "density"].nunique() > 1 else ["form"]
    lines = _lines_of_forms(rows, by)
    figure, panels = figure_of_panels(sorted(set(rows["exchanged"])), columns=3, height=2.1)
    for kind, axes in panels.items():
        Panel(x="rate").draw(axes, rows[rows["exchanged"] == kind], lines, ["sparsifier", *by])
        show_values(axes.xaxis, rows["rate"])
    figure.supxlabel("learning rate of the inner optimizer", fontsize="medium")
    figure.supylabel(metric_of(rows["metric"]).label, fontsize="medium")
    head(figure, title, _handles_of_forms(lines))
    return figure


@style()
def draw_lengths(rows: pd.DataFrame, title: str) -> Figure:
    """How far each form ends from dense over the epochs of the training, a panel per training.

    Takes rows of ``at_several_lengths``. Bands are half the range of the seeds; the grey one is dense's.
    """
    lines = _lines_of_forms(rows[rows["sparsifier"] != "dense"], ["form", "density"])
    trainings = {
        f"{human(str(model))} on {human(str(dataset))}, {workers} workers": own
        for (model, dataset, workers), own in rows.groupby(TRAINING[:3])
    }
    figure, panels = figure_of_panels(list(trainings), columns=3, height=2.0, shared=False)
    for name, axes in panels.items():
        metric = metric_of(trainings[name]["metric"])
        away, room = (metric.scale * trainings[name][column] for column in ("to_dense", "half_range"))
        own = trainings[name].assign(value=away, low=away - room, high=away + room)
        dense = own[own["sparsifier"] == "dense"].sort_values("epochs")
        axes.axhline(0, color=GREY, linewidth=0.6)
        axes.fill_between(dense["epochs"], dense["low"], dense["high"], color=GREY, alpha=0.3, linewidth=0)
        panel = Panel(x="epochs", x_name="epochs")
        panel.draw(axes, own[own["sparsifier"] != "dense"], lines, ["sparsifier", "form", "density"])
        show_values(axes.xaxis, own["epochs"])
        axes.set_ylabel(metric.column, fontsize=7)
    spread = Patch(label="dense, spread of its seeds", color=GREY, alpha=0.3, linewidth=0)
    head(figure, title, [*_handles_of_forms(lines), spread])
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
    lines = _lines_of_forms(chosen, ["form", "rate", "density"])
    seeds = drawn.groupby(["sparsifier", "form", "rate", "density"])["num_seeds"].first().to_dict()
    handles = handles_of({f"{_name_of_form(*key[:2])} (n={seeds[key]})": line for key, line in lines.items()})
    panels = [
        Panel(x="tokens", y="test_loss", x_name="tokens of all workers", show_x=_show_thousands),
        Panel(x="bytes", y="test_loss", x_name="sent by a worker", show_x=show_bytes),
        Panel(x="at_100mbit_ms", y="test_loss", x_name="seconds at 100 Mbit/s, simulated", show_x=plain_log),
        Panel(x="at_1gbit_ms", y="test_loss", x_name="seconds at 1 Gbit/s, simulated", show_x=plain_log),
    ]
    figure = new_figure(PAGE_INCHES, 5.0)
    grid = figure.subplots(2, 2, sharey=True)
    for axes, panel in zip(grid.flat, panels, strict=True):
        panel.draw(axes, drawn, lines, ["sparsifier", "form", "rate", "density"], markevery=[-1])
    for left, _ in grid:
        left.set_ylabel("loss on the test set")
    more = f"; dense, MiCRO's best and the best others of {len(rows)} forms" if len(chosen) < len(rows) else ""
    head(figure, title + more, handles)
    return figure


@style()
def draw_forms(rows: pd.DataFrame, title: str) -> Figure:
    """A row per form, the best on top: the measure, and the bytes sent.

    Of a form that was tried at several rates the best is drawn with the range of its seeds, the others as rings.
    """
    metric, best = metric_of(rows["metric"]), at_best_rate(rows)
    has_one_rate = rows["rate"].nunique() < 2
    figure, (left, right) = _figure_of_rows([_name_of_row(row, rows, has_one_rate) for _, row in best.iterrows()], 2)
    for height, (_, row) in enumerate(best.iterrows()):
        color = highlight(str(row["sparsifier"]))
        others = rows[(rows[FORM[:3]] == row[FORM[:3]]).all(axis=1) & (rows["rate"] != row["rate"])]
        left.plot(others["value"], [height] * len(others), color=color, linestyle="none", **RING)
        _draw_range(left, height, row, color)
        right.plot(row["total_bytes"], height, color=color, marker="o")
    handles = []
    if (dense := best[best["sparsifier"] == "dense"]["value"]).notna().any():
        left.axvline(dense.max() if metric.higher_is_better else dense.min(), **TARGET_LINE)
        handles.append(Line2D([], [], label="dense, at the best of its rates", **TARGET_LINE))
    if len(rows) > len(best):
        handles.append(Line2D([], [], label="the form at its other rates", color=BLACK, linestyle="none", **RING))
    show_metric(left.xaxis, metric)
    right.set_xlabel("sent by a worker")
    show_bytes(right.xaxis, most=2)
    head(figure, f"{title}: {SPREAD}", handles)
    return figure


@style()
def draw_by_epochs(rows: pd.DataFrame, title: str) -> Figure:
    """A row per form, and a mark with its range per length of the training and number of workers."""
    named = rows.assign(name=[f"{in_legend(row['sparsifier'])}, {row['form']}" for _, row in rows.iterrows()])
    names = list(named.sort_values(["epochs", "value"]).drop_duplicates("name")["name"])
    figure, (axes,) = _figure_of_rows(names)
    handles = []
    for ((epochs, workers), own), color in zip(named.groupby(["epochs", "world_size"]), PALETTE, strict=False):
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
    figure, (axes,) = _figure_of_rows([_name_of_row(row, rows, has_one_rate=True) for _, row in rows.iterrows()])
    for height, (_, row) in enumerate(rows.iterrows()):
        color = highlight(str(row["sparsifier"]))
        axes.plot([row[f"bytes_{share}"] for share in MARKS], [height] * len(MARKS), color=color, linewidth=0.6)
        for share, marker in MARKS.items():
            face = color if row[f"num_{share}"] == row["num_seeds"] else "white"
            axes.plot(row[f"bytes_{share}"], height, color=color, marker=marker, markerfacecolor=face)
    axes.set_xlabel("sent by a worker until then")
    show_bytes(axes.xaxis)
    handles = [
        Line2D([], [], label=f"{share} % of dense's end", color=BLACK, marker=marker, linestyle="none")
        for share, marker in MARKS.items()
    ]
    head(figure, title, handles)
    return figure


def _lines_of_forms(rows: pd.DataFrame, by: list[str]) -> Lines:
    """Return the line of each form: the colour of its method, and dashes for the values that it has in some columns."""
    metric = metric_of(rows["metric"])
    ends = rows.groupby("sparsifier")["value"].agg("max" if metric.higher_is_better else "min")
    of_methods = lines_of(
        in_order(rows["sparsifier"]), coloured_methods(ends, higher_is_better=metric.higher_is_better)
    )
    keys = set(rows[["sparsifier", *by]].itertuples(index=False, name=None))
    kinds = sorted({key[1:] for key in keys}, key=lambda kind: (kind[0] != GRADIENTS, kind))
    of_sparse = [kind for kind in kinds if any(key[0] != "dense" and key[1:] == kind for key in keys)]
    lines: dict[Key, LineSettings] = {}
    for method, line in of_methods.items():
        own = [kind for kind in kinds if (method, *kind) in keys]
        places = own if method == "dense" or len(of_sparse) > len(DASHES) else of_sparse
        for kind in own:
            turn, dashes = divmod(places.index(kind), len(DASHES))
            own_line = line | {"linestyle": DASHES[dashes]} | ({"marker": MARKERS[-turn]} if turn else {})
            lines[method, *kind] = GREY_LINE if line is GREY_LINE else own_line
    return lines


def _handles_of_forms(lines: Lines) -> list[Artist]:
    return list(handles_of({_name_of_form(*key): line for key, line in lines.items()}))


def _name_of_form(method: object, *kind: object) -> str:
    words = [f"{word:g}" if isinstance(word, float) else str(word) for word in kind if word not in ("", 1.0)]
    return ", ".join([in_legend(str(method)), *words])


def _figure_of_rows(names: Sequence[str], panels: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a named row for each, the first on top, and its panels."""
    figure = new_figure(PAGE_INCHES, 1.0 + 0.17 * len(names))
    grid = figure.subplots(1, panels, sharey=True, squeeze=False, width_ratios=[3, 2][:panels])[0]
    grid[0].set_yticks(range(len(names)), [plain(name) for name in names])
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    return figure, list(grid)


def _draw_range(axes: Axes, height: int, row: pd.Series, color: str) -> None:
    axes.hlines(height, row["low"], row["high"], color=color, linewidth=0.8)
    axes.plot(row["value"], height, color=color, marker="o")


def _name_of_row(row: pd.Series, rows: pd.DataFrame, has_one_rate: bool) -> str:
    """Return what a form is called, with its density and its rate where there are several."""
    words = [in_legend(str(row["sparsifier"]), str(row["form"]))]
    if row["sparsifier"] != "dense" and rows.loc[rows["sparsifier"] != "dense", "density"].nunique() > 1:
        words.append(f"{row['density']:g}")
    if not has_one_rate:
        words.append(f"rate {row['rate']:g}{f', best of {row.trials}' if row['trials'] > 1 else ''}")
    return ", ".join(words)


def _show_thousands(axis: XAxis | YAxis) -> None:
    axis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")


Drawn = tuple[Figure, pd.DataFrame]  # with the numbers that are in it
Draw = Callable[[pd.DataFrame, pd.DataFrame, str], Drawn]
"""From rows of ``forms``, the rows of the table of runs that they are made of, and a title."""


def _of_forms(
    draw: Callable[[pd.DataFrame, str], Figure], choose: Callable[[pd.DataFrame], pd.DataFrame] = lambda rows: rows
) -> Draw:
    def drawn(rows: pd.DataFrame, runs: pd.DataFrame, title: str) -> Drawn:
        chosen = choose(rows)
        return draw(chosen, title), chosen

    return drawn


def _losses(rows: pd.DataFrame, runs: pd.DataFrame, title: str) -> Drawn:
    numbers = loss_curves(runs)
    return draw_losses(numbers, rows.sort_values("to_dense", ascending=False), title), numbers


KINDS: dict[str, Draw] = {  # that a page may have
    "forms": _of_forms(draw_forms),
    "keep_up": _of_forms(draw_by_density, with_goal),
    "bytes": _of_forms(draw_bytes),
    "lengths": _of_forms(draw_lengths, at_several_lengths),
    "density": _of_forms(draw_by_density),
    "workers": _of_forms(draw_by_workers),
    "rates": _of_forms(draw_by_rate),
    "epochs": _of_forms(draw_by_epochs),
    "curves": _losses,
}
