"""The kinds of figures that a page may have; each is drawn from rows of ``forms``."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from experiments.reports.ablation_figure import draw_forms
from experiments.reports.keep_up_figure import draw_keep_up, with_goal
from experiments.reports.length_figure import at_several_lengths, draw_lengths
from experiments.reports.pages.curves import curves, draw_losses
from experiments.reports.pages.form_figures import draw_by_density, draw_by_epochs, draw_by_rate, draw_by_workers
from experiments.reports.reached_figure import draw_bytes

Drawn = tuple[Figure, pd.DataFrame]  # with the numbers that are in it
Draw = Callable[[pd.DataFrame, pd.DataFrame, str], Drawn]
"""From rows of ``forms``, the rows of the table of runs that they are made of, and a title."""


def _of_forms(draw: Callable[[pd.DataFrame, str], Figure], *, choose: Callable[[pd.DataFrame], pd.DataFrame]) -> Draw:
    def drawn(rows: pd.DataFrame, runs: pd.DataFrame, title: str) -> Drawn:
        chosen = choose(rows)
        return draw(chosen, title), chosen

    return drawn


def _best_first(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.sort_values("to_dense", ascending=False)


def _losses(rows: pd.DataFrame, runs: pd.DataFrame, title: str) -> Drawn:
    numbers = curves(runs)
    return draw_losses(numbers, _best_first(rows), title), numbers


KINDS: dict[str, Draw] = {
    "forms": _of_forms(draw_forms, choose=_best_first),
    "keep_up": _of_forms(draw_keep_up, choose=with_goal),
    "bytes": _of_forms(draw_bytes, choose=lambda rows: rows),
    "lengths": _of_forms(draw_lengths, choose=at_several_lengths),
    "density": _of_forms(draw_by_density, choose=_best_first),
    "workers": _of_forms(draw_by_workers, choose=_best_first),
    "rates": _of_forms(draw_by_rate, choose=_best_first),
    "epochs": _of_forms(draw_by_epochs, choose=_best_first),
    "curves": _losses,
}


def some(rows: pd.DataFrame, of: Mapping[str, object]) -> pd.DataFrame:
    """Return the rows that have some values in some columns."""
    fits: Sequence[pd.Series] = [rows[column] == value for column, value in of.items()]
    return rows[pd.concat(fits, axis=1).all(axis=1)] if fits else rows
