"""How every figure looks: sizes, fonts, one look per method, files with reproducible bytes."""

import math
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from experiments.reports.measures import Metric
from experiments.reports.names import description, label

COLUMN_INCHES, PAGE_INCHES = 3.4, 7.0  # one and both columns of a two-column paper

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

# Okabe and Ito's colours, told apart with any colour vision; grey stands in for their yellow, too light for lines.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK)

DASHED, DOTTED, DASHDOT, LONG = (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2))
Dashes = tuple[int, tuple[float, ...]] | str
DASHES: tuple[Dashes, ...] = ("-", DASHED, DOTTED, DASHDOT, LONG)
MARKERS = "os^vDPX<>*ph"

# What a method's yaml may say after ``# drawn:``, besides a marker of matplotlib.
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


@dataclass(frozen=True, slots=True)
class Look:
    """How one method is named and drawn; colour, dashes and marker together are its own."""

    name: str
    color: str
    dashes: Dashes
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """Settings of a line that is drawn for the method."""
        return {"color": self.color, "linestyle": self.dashes, "marker": self.marker}


def look(method: str) -> Look:
    """Return how to draw a method: as its yaml says, otherwise by a checksum of its key, the same in every figure."""
    drawn = description(method).get("drawn")
    if drawn:
        color, dashes, marker = drawn.split()
        return Look(label(method), COLORS[color], LINES[dashes], marker)
    code = zlib.crc32(method.encode())
    colors = PALETTE[:-1]  # black is the dense baseline's
    return Look(
        label(method), colors[code % len(colors)], DASHES[code // 7 % len(DASHES)], MARKERS[code // 64 % len(MARKERS)]
    )


@contextmanager
def style() -> Iterator[None]:
    """Draw and save inside this, or under it as a decorator: the caller's own settings neither matter nor change."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches that keeps its parts from overlapping and needs no display."""
    return Figure(figsize=(width, height), layout="constrained")


def head(figure: Figure, title: str, handles: Sequence[Artist]) -> None:
    """Put title and legend above the panels, where they cover no data, in as many columns as the width holds."""
    width = figure.get_figwidth()
    longest = max(len(str(handle.get_label())) for handle in handles)
    fitting = int(width / (0.051 * longest + 0.4))  # inches of a letter, and of a line sample with its gaps
    legend = figure.legend(
        handles=handles,
        title=textwrap.fill(title, int(15 * width)),
        loc="outside upper center",
        ncols=max(1, min(len(handles), fitting)),
    )
    legend.get_title().set_multialignment("center")


def show_metric(axis: XAxis | YAxis, metric: Metric) -> None:
    """Name an axis after a measure and write its numbers for people; call it when the data is drawn."""
    if not metric.higher_is_better:  # it falls by orders of magnitude
        plain_log(axis)
    axis.set_label_text(metric.label)
    axis.set_major_formatter(lambda value, _: metric.tick(value))


def show_percent(axes: Axes) -> None:
    """Write the y axis, fractions, as percent."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")


def plain_log(axis: XAxis | YAxis) -> None:
    """Make an axis logarithmic, its ticks written as 0.01 0.02 0.05; call it when the data is drawn.

    One on which nothing above zero is drawn stays as it is.
    """
    if not math.isfinite(axis.get_minpos()):
        return
    scale = axis.axes.set_yscale if axis.axis_name == "y" else axis.axes.set_xscale
    scale("log", nonpositive="mask")
    low, high = axis.get_view_interval()
    if high < 5 * low:  # 1, 2 and 5 alone might leave no tick
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    plain_ticks(axis)


def plain_ticks(axis: XAxis | YAxis) -> None:
    """Write the numbers of an axis as 0.01, not as powers of ten."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


@style()
def save(figure: Figure, numbers: pd.DataFrame, stem: Path, runs: Iterable[str] = ()) -> list[Path]:
    """Write ``stem``.pdf, .png and the drawn numbers as .csv; same input, same bytes. Returns the paths.

    The names of the runs that the numbers come from, where there are any, go to ``stem``.runs.txt.
    """
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".pdf", ".png", ".csv")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.draw_without_rendering()  # places the parts; once is enough for both files
    figure.set_layout_engine("none")
    figure.savefig(paths[0], metadata={"CreationDate": None})
    figure.savefig(paths[1])
    numbers.to_csv(paths[2], index=False, float_format="%.8g", lineterminator="\n")
    names = sorted(set(runs))
    if names:
        paths.append(stem.with_name(f"{stem.name}.runs.txt"))
        paths[-1].write_text("".join(f"{name}\n" for name in names))
    return paths
