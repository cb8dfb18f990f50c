"""Shared parts of figures: size, title, legend, axis numbers, and files with reproducible bytes."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, SymmetricalLogLocator
from numpy.typing import NDArray

from experiments.config.units import human_bytes, three_digits
from experiments.reports.measures import Metric
from experiments.reports.plot_style import GREY_LINE, PAGE_INCHES, LineSettings, plain, style
from experiments.runs.files import write_atomic, write_csv

ERROR_BAR: LineSettings = {"elinewidth": 0.8, "capsize": 1.5, "capthick": 0.8}
LONGEST_LINE = 44  # letters of a row's name on a line
Key = tuple[object, ...]
Show = Callable[[XAxis | YAxis], object]


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches that keeps its parts from overlapping and needs no display."""
    return Figure(figsize=(width, height), layout="constrained")


def figure_of_panels(
    names: Sequence[str], *, columns: int, height: float, shared: bool = True
) -> tuple[Figure, dict[str, Axes]]:
    """Return a figure of a page's width with a small titled panel for each name.

    Args:
        height: of a row of panels, in inches.
        shared: whether the panels have common axes.
    """
    columns = min(columns, len(names))
    num_rows = math.ceil(len(names) / columns)
    figure = new_figure(PAGE_INCHES, 0.9 + height * num_rows)
    grid = figure.subplots(num_rows, columns, sharex=shared, sharey=shared, squeeze=False)
    panels = dict(zip(names, grid.flat, strict=False))
    for name, axes in panels.items():
        axes.set_title(plain(name), fontsize=7)
    for axes in grid.flat[len(names) :]:
        axes.remove()
    for axes in list(panels.values())[-columns:]:  # the lowest of each column
        axes.xaxis.set_tick_params(labelbottom=True)
    return figure, panels


def figure_of_rows(names: Sequence[str], panels: int = 1, *, row_inches: float = 0.17) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of a page's width with a named row for each, the first on top, and its panels."""
    names = [textwrap.fill(plain(name), LONGEST_LINE) for name in names]
    num_lines = max((name.count("\n") + 1 for name in names), default=1)
    figure = new_figure(PAGE_INCHES, 1.0 + max(row_inches, 0.13 * num_lines) * len(names))
    grid = figure.subplots(1, panels, sharey=True, squeeze=False, width_ratios=[3, *[2] * (panels - 1)])[0]
    grid[0].set_yticks(range(len(names)), names)
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    return figure, list(grid)


def draw_band(axes: Axes, x: Any, middle: Any, low: Any, high: Any, line: LineSettings) -> None:
    """Draw means over seeds as a line, and what the seeds span as a band; a grey line has none."""
    axes.plot(x, middle, **line)
    if line is not GREY_LINE:
        axes.fill_between(x, low, high, color=line["color"], alpha=0.15, linewidth=0)


def widths_of(curves: Sequence[pd.DataFrame]) -> list[float]:
    """Return the width of each line, all drawn in turn: one that later ones lie on is wider, and stays seen.

    Args:
        curves: x and y of each.
    """
    hidden = [
        sum(len(other) == len(own) and np.allclose(other, own, rtol=0.01) for other in curves[place + 1 :])
        for place, own in enumerate(curves)
    ]
    return [1.2 + times for times in hidden]


def draw_stacks(
    axes: Axes, lengths: pd.DataFrame, fills: Mapping[str, LineSettings], spread: NDArray[np.float64] | None = None
) -> None:
    """Draw a bar for each row, what ``lengths`` has in the columns ``fills`` end to end, and the total at its end.

    ``spread`` (2, bars): how far each total goes below and above.
    """
    left, places = pd.Series(0.0, index=lengths.index), range(len(lengths))
    for column, fill in fills.items():
        range_of = spread if column == [*fills][-1] else None
        bars = axes.barh(places, lengths[column], left=left, height=0.65, xerr=range_of, error_kw=ERROR_BAR, **fill)
        left = left + lengths[column]
    axes.bar_label(bars, [three_digits(total) for total in left], padding=3, fontsize=7)
    axes.grid(visible=False, axis="y")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A line for each value that rows have in the columns ``by``, the method first, and their entries of the legend."""

    by: Sequence[str]
    of: Mapping[Key, LineSettings]
    handles: Sequence[Artist]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of lines: two columns, what they are called, and how their numbers are written once all is drawn.

    ``also`` draws what stands beside the lines, such as a target, given the panel's rows.
    """

    x: str
    y: str = "value"
    x_name: str = ""
    y_name: str = ""
    show_x: Show = lambda axis: None
    show_y: Show = lambda axis: None
    also: Callable[[Axes, pd.DataFrame], object] = lambda axes, rows: None

    def draw(self, axes: Axes, rows: pd.DataFrame, lines: Lines, **settings: object) -> None:
        """Draw the line of each form, with the range of its seeds as a band where the rows have one."""
        low, high = ("low", "high") if self.y == "value" else (f"{self.y}_min", f"{self.y}_max")
        groups = [(key, own.sort_values(self.x)) for key, own in rows.groupby([*lines.by])]
        widths = widths_of([own[[self.x, self.y]] for _, own in groups])
        for place, ((key, own), width) in enumerate(zip(groups, widths, strict=True)):
            every = max(1, len(own) // 8)
            marks = {"markevery": (place % every, every), "linewidth": width} | settings
            line = lines.of[key] if lines.of[key] is GREY_LINE else lines.of[key] | marks
            least, most = (own[end if end in own else self.y] for end in (low, high))
            draw_band(axes, own[self.x], own[self.y], least, most, line)
        self.also(axes, rows)
        axes.set_xlabel(self.x_name)
        if self.y_name:
            axes.set_ylabel(self.y_name)


def figure_of_lines(
    title: str,
    rows: pd.DataFrame,
    panels: Sequence[Panel],
    lines: Lines,
    handles: Sequence[Artist] = (),
    *,
    height: float,
    num_rows: int = 1,
    sharey: bool = True,
    **settings: object,
) -> Figure:
    """Draw rows of panels side by side on a page's width, all with the same lines.

    Args:
        handles: entries of the legend beside those of the lines.
        settings: of every line.
    """
    figure = new_figure(PAGE_INCHES, height)
    grid = figure.subplots(num_rows, len(panels) // num_rows, sharey=sharey, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=True):
        panel.draw(axes, rows, lines, **settings)
    for axes, panel in zip(grid.flat, panels, strict=True):
        panel.show_x(axes.xaxis)
        panel.show_y(axes.yaxis)
    head(figure, title, [*lines.handles, *handles])
    return figure


def head(figure: Figure, title: str, handles: Sequence[Artist]) -> None:
    """Put title and legend above the panels, where they cover no data, in as many columns as the width holds."""
    width = figure.get_figwidth()
    for handle in handles:
        handle.set_label(textwrap.fill(plain(str(handle.get_label())), int((width - 0.6) / 0.055)))
    longest = max((len(line) for handle in handles for line in str(handle.get_label()).splitlines()), default=0)
    fitting = int(width / (0.051 * longest + 0.4))  # inches of a letter, and of a line sample with its gaps
    further = sum(str(handle.get_label()).count("\n") for handle in handles)  # lines
    figure.set_figheight(figure.get_figheight() + 0.13 * further)
    legend = figure.legend(
        handles=handles,
        title=textwrap.fill(plain(title), int(15 * width)),
        loc="outside upper center",
        ncols=max(1, min(len(handles), fitting)),
    )
    legend.get_title().set_multialignment("center")


def handles_of(lines: Mapping[str, LineSettings]) -> list[Line2D]:
    """Return the entries of a legend, given the line of each name: one for all grey ones."""
    shown = {name: line for name, line in lines.items() if line is not GREY_LINE}
    if len(shown) < len(lines):
        others = len(lines) - len(shown)
        shown[f"{others} other{'s' if others > 1 else ''}, in the table"] = GREY_LINE
    return [Line2D([], [], label=name, **line) for name, line in shown.items()]


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


def show_values(axis: XAxis | YAxis, values: Iterable[float]) -> None:
    """Make an axis logarithmic with a tick at each of a few values, as of workers or rates."""
    scale = axis.axes.set_yscale if axis.axis_name == "y" else axis.axes.set_xscale
    scale("log")
    axis.set_ticks(sorted(set(values)))
    axis.set_minor_locator(NullLocator())
    plain_ticks(axis)


def show_bytes(axis: XAxis | YAxis, most: int = 4) -> None:
    """Make an axis of bytes logarithmic, with about so many numbers: a narrow panel takes three."""
    axis.axes.margins(x=0.1)
    plain_log(axis)
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log" and high > 10 * low:
        axis.set_major_locator(LogLocator(subs=(1,) if high > 300 * low else (1, 3), numticks=most))
    axis.set_major_formatter(lambda value, _: human_bytes(value))


def log_with_zero(axes: Axes, values: pd.Series) -> None:
    """Make the y axis logarithmic; where there are zeros, as of an exact method, linear below a small decade."""
    if not (values == 0).any():
        plain_log(axes.yaxis)
        return
    least = values[values > 0].min()
    decade = 1e-3 if math.isnan(least) else max(1e-4, 10 ** math.floor(math.log10(least)))
    axes.set_yscale("symlog", linthresh=decade)
    axes.set_ylim(bottom=-0.4 * decade)
    subs = (1.0, 2.0, 5.0) if axes.get_ylim()[1] < 100 * decade else (1.0,)  # one decade has one power of ten
    axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=decade, subs=subs))
    plain_ticks(axes.yaxis)


def plain_ticks(axis: XAxis | YAxis) -> None:
    """Write the numbers of an axis as 0.01 and 1,000,000, not as powers of ten."""
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.set_minor_formatter(NullFormatter())


@style()
def save(
    figure: Figure,
    numbers: pd.DataFrame,
    stem: Path,
    runs: Iterable[str] = (),
    *,
    notes: Sequence[str] = (),
) -> list[Path]:
    """Write ``stem``.pdf, .png and the drawn numbers as .csv; same input, same bytes. Returns the paths.

    The names of the runs that the numbers come from, where there are any, go to ``stem``.runs.txt. ``notes`` stand
    below the figure.

    Raises:
        OSError: a file cannot be written; those written before are whole.
    """
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".pdf", ".png", ".csv")]
    if notes:
        text = "\n".join(textwrap.fill(plain(line), int(18 * figure.get_figwidth())) for line in notes)
        figure.supxlabel(text, fontsize="x-small", color="firebrick")
    figure.draw_without_rendering()  # places the parts; once is enough for both files
    figure.set_layout_engine("none")
    write_atomic(paths[0], _drawn(figure, "pdf", metadata={"CreationDate": None}))
    write_atomic(paths[1], _drawn(figure, "png"))
    write_csv(numbers, paths[2])
    names = sorted(set(runs))
    if names:
        paths.append(stem.with_name(f"{stem.name}.runs.txt"))
        write_atomic(paths[-1], "".join(f"{name}\n" for name in names))
    return paths


def _drawn(figure: Figure, kind: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, **settings)
    return file.getvalue()
