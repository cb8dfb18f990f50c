"""Shared parts of the tools' figures: named lines, panels below each other, and the files of a report."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from experiments.reports.figure_parts import Lines, Panel, handles_of, head, new_figure, save
from experiments.reports.names import human, in_legend
from experiments.reports.plot_style import COLUMN_INCHES, PAGE_INCHES, LineSettings, plain
from experiments.runs.files import write_atomic, write_csv

Content = str | pd.DataFrame | tuple[Figure, pd.DataFrame]
Files = Iterable[tuple[str, Content]]
"""Names without suffix of texts (.md), numbers (.csv), and figures with their numbers (.pdf, .png, .csv)."""


def named_lines(by: Sequence[str], lines: Mapping[Any, LineSettings], name: Callable[..., str] = in_legend) -> Lines:
    """Return the lines of keys, the values of the columns ``by``; the legend calls each what ``name`` makes of it."""
    return Lines(by=by, of=lines, handles=handles_of({name(*key): line for key, line in lines.items()}))


def figure_of_facets(
    title: str,
    rows: pd.DataFrame,
    facets: Sequence[str],
    panels: Sequence[Panel],
    lines: Lines,
    handles: Sequence[Artist] = (),
    *,
    height: float = 2.0,
) -> Figure:
    """Draw the panels below each other for each value that rows have in the columns ``facets``, with the same lines.

    Of several such columns the values of the last stand side by side.
    """
    groups, columns = list(rows.groupby([*facets], sort=False)), rows[facets[-1]].nunique()
    num_rows = len(panels) * -(-len(groups) // columns)
    figure = new_figure(PAGE_INCHES if columns > 1 else 1.2 * COLUMN_INCHES, 1.0 + height * num_rows)
    grid = figure.subplots(num_rows, columns, sharex=True, sharey="row", squeeze=False)
    for place, (key, own) in enumerate(groups):
        column = grid[place // columns * len(panels) :, place % columns]
        column[0].set_title(textwrap.fill(", ".join(plain(human(str(word))) for word in key), 96 // columns))
        for axes, panel in zip(column, panels, strict=False):
            panel.draw(axes, own, lines)
            panel.show_x(axes.xaxis)
            panel.show_y(axes.yaxis)
            axes.label_outer()
    head(figure, title, [*lines.handles, *handles])
    return figure


def write_files(files: Files, out: Path, *, notes: Mapping[str, Sequence[str]] | None = None) -> None:
    """Write files into a folder and print their paths.

    Args:
        notes: lines that stand below a figure, by its name.

    Raises:
        CannotWrite: the folder takes no more.
    """
    for name, content in files:
        if isinstance(content, str):
            paths = [write_atomic(out / f"{name}.md", content)]
        elif isinstance(content, pd.DataFrame):
            paths = [write_csv(content, out / f"{name}.csv")]
        else:
            paths = save(*content, out / name, notes=(notes or {}).get(name, ()))
        print(*paths, sep="\n")
