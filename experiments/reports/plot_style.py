"""How every figure looks: sizes, fonts, colours, and one look per method."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib

from experiments.reports.names import description, label

COLUMN_INCHES, PAGE_INCHES = 3.4, 7.0  # one and both columns of a two-column paper
LineSettings = dict[str, Any]

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
LIGHT = "#c4c4c4"  # of what is shown beside the methods in colour
PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK)

DASHED, DOTTED, DASHDOT, LONG = (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2))
Dashes = tuple[int, tuple[float, ...]] | str
DASHES: tuple[Dashes, ...] = ("-", DASHED, DOTTED, DASHDOT, LONG)
MARKERS = "os^vDPX<>*ph"

# Colours and dashes that a method's yaml may name after ``# drawn:``; its marker is one of matplotlib's.
COLORS = {
    "black": BLACK,
    "orange": ORANGE,
    "sky": SKY,
    "green": GREEN,
    "blue": BLUE,
    "vermillion": VERMILLION,
    "purple": PURPLE,
    "grey": GREY,
}
LINES: dict[str, Dashes] = {"solid": "-", "dashed": DASHED, "dotted": DOTTED, "dashdot": DASHDOT, "long": LONG}

TARGET_LINE: LineSettings = {"color": BLACK, "linewidth": 0.8, "linestyle": (0, (1, 1.5))}


@dataclass(frozen=True, slots=True)
class Look:
    """How one method is named and drawn; colour, dashes and marker together are its own."""

    name: str
    color: str
    dashes: Dashes
    marker: str

    @property
    def line(self) -> LineSettings:
        """Settings of a line that is drawn for the method."""
        return {"color": self.color, "linestyle": self.dashes, "marker": self.marker}


def plain(text: str) -> str:
    """Return a text that matplotlib draws as it is: between two dollar signs it would read a formula."""
    return text.replace("\\$", "$").replace("$", "\\$")


def look(method: str) -> Look:
    """Return how to draw a method: as its yaml describes, otherwise by a checksum of its key."""
    drawn = description(method).get("drawn")
    if drawn:
        color, dashes, marker = drawn.split()
        return Look(plain(label(method)), COLORS[color], LINES[dashes], marker)
    code = zlib.crc32(method.encode())
    colors = PALETTE[:-1]  # black is the dense baseline's
    return Look(
        plain(label(method)),
        colors[code % len(colors)],
        DASHES[code // 7 % len(DASHES)],
        MARKERS[code // 64 % len(MARKERS)],
    )


@contextmanager
def style() -> Iterator[None]:
    """Draw and save inside this, or under it as a decorator: the caller's own settings neither matter nor change."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield
