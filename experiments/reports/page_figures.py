"""Pages with their figures, of the kinds that a page may have; each is drawn from rows of ``forms``."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.config.errors import check_choice
from experiments.reports.figure_parts import save
from experiments.reports.form_lines import (
    at_several_lengths,
    draw_by_density,
    draw_by_rate,
    draw_by_workers,
    draw_lengths,
)
from experiments.reports.form_rows import draw_by_epochs, draw_bytes, draw_forms
from experiments.reports.forms import forms, with_goal
from experiments.reports.loss_curves import curves, draw_losses
from experiments.reports.output import write_file
from experiments.reports.page import Page, in_words, markdown
from experiments.reports.provenance import differences
from experiments.reports.table import origins

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
    numbers = curves(runs)
    return draw_losses(numbers, rows.sort_values("to_dense", ascending=False), title), numbers


KINDS: dict[str, Draw] = {
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


def write_page(page: Page, table: pd.DataFrame, out: Path, figures: Path) -> list[Path]:
    """Write the text of a page to ``out`` and its figures, each with its numbers, to ``figures``.

    Returns the paths.
    """
    runs = page.runs(table)
    rows = forms(runs)
    written = [write_file(out / f"{page.name}.md", markdown(page, rows, runs))]
    for each in page.figures:
        check_choice(f"{page.name}: show", KINDS, each.show)
        own, of_these = (_some(table, each.of) for table in (rows, runs))
        figure, numbers = KINDS[each.show](own, of_these, each.title or in_words(own))
        known = origins(of_these)
        written += save(figure, numbers, figures / each.file, known, notes=differences(known, known))
    return written


def _some(rows: pd.DataFrame, of: Mapping[str, object]) -> pd.DataFrame:
    """Return the rows that have some values in some columns."""
    for column, value in of.items():
        rows = rows[rows[column] == value]
    return rows
