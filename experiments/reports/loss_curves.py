"""The loss on the test set of the forms of a language model against tokens, bytes, and seconds on links."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import head, new_figure, plain_log
from experiments.reports.forms import FORM, TRAINING, seconds_on_link, with_settings
from experiments.reports.link_times import RATES
from experiments.reports.names import in_legend
from experiments.reports.plot_style import DASHES, PAGE_INCHES, LineSettings, lines_of, style
from experiments.reports.table import configs, points

NUM_DRAWN = 8
KEYS = [*TRAINING, *FORM]
PANELS = {
    "tokens": "tokens of all workers",
    "bytes": "sent by a worker",
    "at_100mbit_ms": "seconds at 100 Mbit/s, simulated",
    "at_1gbit_ms": "seconds at 1 Gbit/s, simulated",
}


def curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per form and evaluation of bits per byte, means over its runs that were evaluated before the end.

    Columns: KEYS; num_seeds; step; tokens of all workers, bytes that rank 0 sent, and seconds on links (the keys of
    RATES) until then; test_loss, in nats per byte.
    """
    own = runs[runs["kind"] == "run"]
    lengths = [int(str(config["dataset.sequence_length"])) for config in configs(own)]
    found = points(with_settings(own.assign(sequence=lengths)))
    found = found[found.groupby("run")["step"].transform("size") > 1]
    found = found.assign(**{key: seconds_on_link(found, rate) for key, rate in RATES.items()})
    size = found["world_size"] * found["batch_size"] * found["batches"] * found["sequence"]
    found = found.assign(
        tokens=found["step"] * size, bytes=found["total_bytes"], test_loss=math.log(2) * found["value"]
    )
    grouped = found.groupby([*KEYS, "step"])
    means = grouped[["tokens", "bytes", *RATES, "test_loss"]].mean().assign(num_seeds=grouped.size())
    return means.reset_index()


def drawn(rows: pd.DataFrame, numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that are drawn, NUM_DRAWN at most: dense at every step, MiCRO's best, and the best others.

    Args:
        rows: of ``forms``, the best first.
        numbers: of ``curves``; forms without a curve are left out, and so are longer trainings and more workers.
    """
    rows = rows.merge(numbers[KEYS].drop_duplicates(), on=KEYS)
    rows = rows[(rows["epochs"] == rows["epochs"].min()) & (rows["world_size"] == rows["world_size"].min())]
    is_first = (rows["sparsifier"] == "dense") & (rows["form"] == "gradients")
    is_first |= rows.index.isin(rows.index[rows["sparsifier"] == "micro"][:1])
    return pd.concat([rows[is_first], rows[~is_first]])[:NUM_DRAWN]


@style()
def draw_losses(numbers: pd.DataFrame, rows: pd.DataFrame, title: str) -> Figure:
    """Loss on the test set over tokens, bytes and seconds on links, a line per form with a mark at its end.

    Args:
        numbers: of ``curves``.
        rows: of ``forms``, the best first; those are drawn that ``drawn`` chooses.
    """
    chosen = drawn(rows, numbers)
    figure = new_figure(PAGE_INCHES, 5.0)
    grid = figure.subplots(2, 2, sharey=True)
    handles = []
    for (_, row), line in zip(chosen.iterrows(), _lines(chosen), strict=True):
        own = numbers[(numbers[KEYS] == row[KEYS]).all(axis=1)]
        name = f"{in_legend(row['sparsifier'])}, {row['form']} (n={own['num_seeds'].iloc[0]})"
        handles.append(Line2D([], [], label=name, **line))
        for axes, column in zip(grid.flat, PANELS, strict=True):
            axes.plot(own[column], own["test_loss"], **line, markevery=[-1])
    for axes, (column, name) in zip(grid.flat, PANELS.items(), strict=True):
        axes.set_xlabel(name)
        _show_amounts(axes, column)
    for left, _ in grid:
        left.set_ylabel("loss on the test set")
    more = f"; dense, MiCRO's best and the best others of {len(rows)} forms" if len(chosen) < len(rows) else ""
    head(figure, title + more, handles)
    return figure


def _lines(chosen: pd.DataFrame) -> list[LineSettings]:
    """Return a line per row: a colour for each method and outer optimizer, dashes for what is exchanged."""
    parts = chosen["form"].str.partition(", ")
    forms = list(zip(chosen["sparsifier"], parts[2], strict=True))
    lines = lines_of(sorted(forms, key=lambda form: form[1] != ""))  # the plain form of dense is black
    kinds = list(dict.fromkeys(["gradients", *sorted(parts[0])]))
    dashes = (DASHES[kinds.index(exchanged) % len(DASHES)] for exchanged in parts[0])
    return [lines[form] | {"linestyle": own, "linewidth": 1.0} for form, own in zip(forms, dashes, strict=True)]


def _show_amounts(axes: Axes, column: str) -> None:
    """Write an axis of tokens, bytes or seconds for people; all but tokens differ by orders of magnitude."""
    if column == "tokens":
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
        return
    plain_log(axes.xaxis)
    if column == "bytes":
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
