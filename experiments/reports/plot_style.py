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

# The colour and the mark of a method in every figure where no other has them: alike on all figures of a paper's page.
HOME = {
    "dense": (BLACK, "o"),
    "exact": (BLACK, "*"),
    "exact plan": (BLACK, "*"),
    "micro": (VERMILLION, "s"),
    "topk": (BLUE, "^"),
    "topk_gather": (BLUE, "^"),
    "single": (BLUE, "v"),
    "one bucket": (BLUE, "v"),
    **dict.fromkeys(("cltk", "randomk", "oktopk", "qsgd", "demo_tiles", "layerwise", "by layer (WFBP)"), (GREEN, "D")),
    **dict.fromkeys(("threshold", "gtopk", "terngrad", "gaussiank_published"), (ORANGE, "v")),
    **dict.fromkeys(("sidco", "oktopk_published", "topk_range_float"), (PURPLE, "P")),
    **dict.fromkeys(("exdyna", "gaussiank", "fft", "sparseloco", "demo_momentum", "ddp", "DDP's own"), (SKY, "X")),
    **dict.fromkeys(("micro_published", "dsa", "fft_feedback", "sparseloco_published", "demo_senders"), (WINE, "<")),
    **dict.fromkeys(("mgwfbp", "merged (MG-WFBP)"), (VERMILLION, "p")),
}

GREY_LINE: LineSettings = {"color": LIGHT, "linestyle": "-", "linewidth": 0.6, "zorder": 1.2}
TARGET_LINE: LineSettings = {"color": BLACK, "linewidth": 0.8, "linestyle": (0, (1, 1.5))}


def plain(text: str) -> str:
    """Return a text that matplotlib draws as it is: between two dollar signs it would read a formula."""
    return text.replace("\\$", "$").replace("$", "\\$")


def lines_of(keys: Iterable[Key], preferred: Iterable[Key] | None = None) -> dict[Key, LineSettings]:
    """Return the line of each method of one figure: no two have one colour, and those without one are GREY_LINE.

    A method has its HOME's colour and mark, unless another one of the figure has that colour; dense is black and MiCRO
    vermillion in every figure. A schedule of dense gradients is a method here.

    Args:
        keys: methods, or tuples that begin with one, in the order of the legend.
        preferred: those that have a colour, as far as there are colours; None: the first.
    """
    keys = list(dict.fromkeys(keys))
    names = {key: _line_name(key) for key in keys if preferred is None or key in {*preferred}}
    own: dict[Key, tuple[str, str]] = {}
    for key in sorted(names, key=lambda key: names[key] not in ALWAYS):
        if names[key] in HOME and HOME[names[key]][0] not in {color for color, _ in own.values()}:
            own[key] = HOME[names[key]]
    taken = [*(color for color, _ in own.values()), *ALWAYS.values()]
    free = [color for color in FREE if color not in taken]
    lines = dict[Key, LineSettings]()
    for place, key in enumerate(keys):
        color, mark = own.get(key) or (free.pop(0) if free and key in names else "", MARKERS[place % len(MARKERS)])
        dashes = "-" if color in ALWAYS.values() else DASHES[place % len(DASHES)]
        lines[key] = {"color": color, "linestyle": dashes, "marker": mark} if color else GREY_LINE
    return lines


def _line_name(key: Hashable) -> str:
    """Return the name in HOME of a method, or of a tuple that begins with one; of dense its schedule."""
    method, *others = key if isinstance(key, tuple) else (key,)
    schedule = str(others[0]).removeprefix("schedule=") if others else ""
    return schedule if method == "dense" and schedule in HOME else str(method)


def coloured_methods(ends: pd.Series) -> list[str] | None:
    """Return the methods to be drawn in colour where there are more than colours: ALWAYS and the best; None: all.

    Args:
        ends: how good each method was, by its name; more is better.
    """
    ranked = ends.sort_values(ascending=False, na_position="last").index
    others = [method for method in ranked if method not in ALWAYS]
    return [*ALWAYS, *others[: len(FREE)]] if len(others) > len(FREE) else None


def highlight(method: str) -> str:
    """Return the colour of a method in a figure that names it beside its row; of those without a HOME blue."""
    return HOME.get(method, (BLUE, "o"))[0]


@contextmanager
def style() -> Iterator[None]:
    """Draw and save inside this, or under it as a decorator: the caller's own settings neither matter nor change."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield
