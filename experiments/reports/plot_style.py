"""The style of all figures: sizes, fonts, colours, and a line style per method."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import matplotlib
import pandas as pd

COLUMN_INCHES, PAGE_INCHES = 3.4, 7.0  # one and both columns of a two-column paper
LineSettings = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the same everywhere
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "legend.title_fontsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "pdf.fonttype": 42,  # TrueType: some publishers refuse Type 3
    "svg.hashsalt": "micro",
    "savefig.dpi": 200,
}

# Okabe and Ito's colours, distinct with any colour vision; grey in place of their yellow, too light for lines.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
WINE = "#882255"
LIGHT = "#c4c4c4"  # of what is shown beside the methods in colour
PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK)
ALWAYS = {"dense": BLACK, "micro": VERMILLION}  # the baseline, and the method of this project
FREE = (BLUE, GREEN, ORANGE, PURPLE, SKY, WINE)  # of the other methods of a figure

DASHED, DOTTED, DASHDOT, LONG = (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2))
Dashes = tuple[int, tuple[float, ...]] | str
DASHES: tuple[Dashes, ...] = ("-", DASHED, DOTTED, DASHDOT, LONG)
MARKERS = "os^vDPX<>*ph"

GREY_LINE: LineSettings = {"color": LIGHT, "linestyle": "-", "linewidth": 0.6, "zorder": 1.2}
TARGET_LINE: LineSettings = {"color": BLACK, "linewidth": 0.8, "linestyle": (0, (1, 1.5))}


def plain(text: str) -> str:
    """Return a text that matplotlib draws as it is: between two dollar signs it would read a formula."""
    return text.replace("\\$", "$").replace("$", "\\$")


def lines_of(keys: Iterable[Key], preferred: Iterable[Key] | None = None) -> dict[Key, LineSettings]:
    """Return the line of each method of one figure: no two have one colour, and those without one are GREY_LINE.

    Dense is black and MiCRO vermillion in every figure.

    Args:
        keys: methods, or tuples that begin with one, in the order of the legend.
        preferred: those that have a colour, as far as there are colours; None: the first.
    """
    own, free, lines = dict(ALWAYS), list(FREE), dict[Key, LineSettings]()
    keys = list(dict.fromkeys(keys))
    chosen = set(keys if preferred is None else preferred)
    for place, key in enumerate(keys):
        method = str(key[0] if isinstance(key, tuple) else key)
        color = (own.pop(method, None) or (free.pop(0) if free else None)) if key in chosen else None
        dashes = "-" if color == ALWAYS.get(method) else DASHES[place % len(DASHES)]
        line: LineSettings = {"color": color, "linestyle": dashes, "marker": MARKERS[place % len(MARKERS)]}
        lines[key] = line if color else GREY_LINE
    return lines


def coloured_methods(ends: pd.Series) -> list[str] | None:
    """Return the methods to be drawn in colour where there are more than colours: ALWAYS and the best; None: all.

    Args:
        ends: how good each method was, by its name; more is better.
    """
    ranked = ends.sort_values(ascending=False, na_position="last").index
    others = [method for method in ranked if method not in ALWAYS]
    return [*ALWAYS, *others[: len(FREE)]] if len(others) > len(FREE) else None


def highlight(method: str) -> str:
    """Return the colour of a method in a figure that names it beside its row: that of dense, of MiCRO, or of all."""
    return ALWAYS.get(method, BLUE)


@contextmanager
def style() -> Iterator[None]:
    """Draw and save inside this, or under it as a decorator: the caller's own settings neither matter nor change."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield
