"""Draw simulated steps: speed-up over workers, timelines of backward and exchange, published gains."""

from collections.abc import Callable
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from experiments.config.units import human_bytes, three_digits
from experiments.reports import figure_parts as parts
from experiments.reports import plot_style as look
from experiments.reports.figure_parts import Panel, Show
from experiments.reports.names import human, in_legend, in_order
from experiments.reports.plot_style import LineSettings, style
from experiments.tools.shared.drawings import figure_of_facets, named_lines
from experiments.tools.simulate.method_choices import DENSE
from experiments.tools.simulate.tables import rate_name, way_name

READINGS: dict[tuple[object, ...], LineSettings] = {
    ("layer", 16): {"color": look.BLUE, "linestyle": "-"},
    ("layer", 8): {"color": look.BLUE, "linestyle": look.DASHED},
    ("tensor", 16): {"color": look.VERMILLION, "linestyle": look.DASHDOT},
    ("tensor", 8): {"color": look.VERMILLION, "linestyle": look.DOTTED},
}
LEVELS: dict[str, LineSettings] = {
    "two levels": {"linestyle": "-"},
    "one level": {"linestyle": "--", "markerfacecolor": "white"},
}
BREAKDOWN: dict[str, LineSettings] = {
    "compute_s": {"facecolor": look.SKY},
    "select_s": {"facecolor": look.VERMILLION},
    "exposed_s": {"facecolor": look.GREEN},
}
MOST_SIZES = 5  # a breakdown shows at most so many numbers of workers
TONES = {"backward": (look.SKY, look.BLUE), "exchange": (look.ORANGE, look.VERMILLION)}  # alternate between messages
PUBLISHED_LINE: LineSettings = {"color": look.BLACK, "linestyle": "-", "linewidth": 0.8}


def _show_powers(axis: XAxis | YAxis) -> None:
    """Mark an axis at 1, 4, 16 and so on."""
    (axis.axes.set_yscale if axis.axis_name == "y" else axis.axes.set_xscale)("log", base=2)
    axis.set_major_locator(LogLocator(base=4, numticks=12))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _show_amounts(write: Callable[[float], str]) -> Show:
    def show(axis: XAxis | YAxis) -> None:
        axis.axes.set_yscale("log")
        axis.set_major_locator(LogLocator(numticks=8))
        axis.set_major_formatter(lambda value, _: write(value))
        axis.set_minor_formatter(NullFormatter())

    return show


def _draw_linear(axes: Axes, rows: pd.DataFrame) -> None:
    ends = [rows["workers"].min(), rows["workers"].max()]
    axes.plot(ends, ends, **look.TARGET_LINE)


def _draw_whole(axes: Axes, _rows: pd.DataFrame) -> None:
    axes.axhline(1, **look.TARGET_LINE)
    axes.set_ylim(0, 1.05)
    parts.show_percent(axes)


WORKERS = Panel(x="workers", x_name="workers", show_x=_show_powers)
SPEEDUP = replace(WORKERS, y="speedup", y_name="speed-up over one worker", show_y=_show_powers, also=_draw_linear)
EFFICIENCY = replace(WORKERS, y="efficiency", y_name="efficiency (% of linear)", also=_draw_whole)
BETWEEN = replace(
    WORKERS, y="between_bytes", y_name="to other nodes, a worker and step", show_y=_show_amounts(human_bytes)
)
BORDER = replace(WORKERS, y="border", y_name="bandwidth of a link (bit/s)", show_y=_show_amounts(rate_name))


@style()
def draw_speedups(numbers: pd.DataFrame, title: str) -> Figure:
    """Speed-up and efficiency over workers; columns model, workers, method, schedule, speedup, efficiency."""
    ways = look.lines_of(zip(numbers["method"], numbers["schedule"], strict=True))
    lines = named_lines(["method", "schedule"], ways, in_legend_of)
    linear = Line2D([], [], label="linear", **look.TARGET_LINE)
    return figure_of_facets(title, numbers, ["model"], [SPEEDUP, EFFICIENCY], lines, [linear])


@style()
def draw_breakdown(numbers: pd.DataFrame, density: str) -> Figure:
    """Draw the parts of a step of each method, a panel for each of the largest numbers of workers, of one model.

    Columns model, network, algorithm, workers, method, schedule, compute_s, select_s, exposed_s.
    """
    first, sizes = numbers.iloc[0], sorted(set(numbers["workers"]))[-MOST_SIZES:]
    ways = list(dict.fromkeys(zip(numbers["method"], numbers["schedule"], strict=True)))
    figure, panels = parts.figure_of_rows([in_legend_of(*way) for way in ways], len(sizes))
    of_ways, longest = numbers.set_index(["workers", "method", "schedule"])[[*BREAKDOWN]], numbers["step_s"].max()
    for axes, workers in zip(panels, sizes, strict=True):
        parts.draw_stacks(axes, 1e3 * of_ways.loc[workers].loc[ways], BREAKDOWN)
        axes.set(title=f"{workers} worker{'s' if workers > 1 else ''}", xlim=(0, 1.35e3 * longest))
    figure.supxlabel("time of a step (ms), a batch of the same size on each worker", fontsize="medium")
    title = f"{human(first['model'])} on {first['network']}, {first['algorithm']}, {density}, "
    title += f"simulated: {three_digits(1e3 * first['compute_s'])} ms of computation"
    names = dict(zip(BREAKDOWN, ("computation", "selection", "communication not hidden by backward"), strict=True))
    parts.head(figure, title, [Patch(label=name, **BREAKDOWN[column]) for column, name in names.items()])
    return figure


@style()
def draw_sizes(numbers: pd.DataFrame, title: str) -> Figure:
    """Bytes of each tensor and when backward completes it; columns tensor, num_bytes, ready_ms."""
    panel = Panel(x="tensor", x_name="tensor, in the order of backward")
    panels = [
        replace(panel, y="num_bytes", y_name="bytes of the tensor", show_y=_show_amounts(human_bytes)),
        replace(panel, y="ready_ms", y_name="gradient complete after (ms)"),
    ]
    lines = named_lines(["what"], {("tensors",): {"color": look.BLUE, "marker": ".", "linewidth": 0.5}}, str)
    drawn = numbers.assign(what="tensors")
    return parts.figure_of_lines(title, drawn, panels, lines, height=2.6, sharey=False, markevery=1, linewidth=0.5)


@style()
def draw_borders(numbers: pd.DataFrame, title: str, rates: tuple[float, float]) -> Figure:
    """Draw the rate of a link below which each method is faster than dense; columns model, method, workers, border.

    A border above the highest rate is drawn at that rate; a method that is never faster has no mark.
    """
    seen = numbers.assign(border=numbers["border"].clip(upper=rates[1]).where(numbers["border"] > 0))
    lines = named_lines(["method"], look.lines_of((name,) for name in in_order(numbers["method"])))
    panel = replace(BORDER, also=lambda axes, _: axes.set_ylim(rates[0], 1.3 * rates[1]))
    return figure_of_facets(title, seen, ["model"], [panel], lines)


@style()
def draw_levels(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw efficiency and bytes between nodes: solid lines for two levels, dashed ones with hollow marks for one.

    Columns model, algorithm, workers, method, levels, efficiency, between_bytes.
    """
    lines = {
        (method, levels): line if line is look.GREY_LINE else line | kind
        for method, line in look.lines_of(in_order(numbers["method"])).items()
        for levels, kind in LEVELS.items()
    }
    words = numbers["levels"].map({level.split()[0]: level for level in LEVELS})
    seen = numbers.assign(levels=words, between_bytes=numbers["between_bytes"].where(numbers["between_bytes"] > 0))
    named = named_lines(["method", "levels"], lines, lambda method, levels: f"{in_legend(method)}, {levels}")
    panels = [EFFICIENCY, BETWEEN] if seen["between_bytes"].notna().any() else [EFFICIENCY]  # none with one node
    return figure_of_facets(title, seen, ["model", "algorithm"], panels, named)


@style()
def draw_headline(numbers: pd.DataFrame, title: str) -> Figure:
    """Gains of merged gradients over the assumed computation, a column of panels per model.

    Columns model, grain, fitted_at, compute_s, over_layerwise, over_single, published_layerwise, published_single.
    """

    def panel(other: str) -> Panel:
        def draw_published(axes: Axes, rows: pd.DataFrame) -> None:
            published = float(rows[f"published_{other}"].iloc[0])
            axes.axhline(published, **PUBLISHED_LINE)
            of = axes.get_yaxis_transform()
            axes.annotate(f"published {published:g}", (1, published), (0, 2), of, "offset points", ha="right")
            axes.set_ylim(0.95, 1 + 2 * (numbers[f"published_{other}"].max() - 1))

        return Panel(
            x="compute_s",
            y=f"over_{other}",
            x_name="assumed forward + backward of a worker (s)",
            y_name=f"{human(other)} / merged",
            show_x=parts.plain_log,
            also=draw_published,
        )

    lines = named_lines(["grain", "fitted_at"], READINGS, "sent by {}, fit of {} ranks".format)
    published = Line2D([], [], label="published", **PUBLISHED_LINE)
    panels = [panel(other) for other in ("layerwise", "single")]
    return figure_of_facets(title, numbers, ["model"], panels, lines, [published])


@style()
def draw_timeline(numbers: pd.DataFrame) -> Figure:
    """Draw when backward computes each layer and when each message is sent, two rows per schedule, of one model.

    Layers have the tone of their message. Columns model, network, algorithm, workers, schedule, group, what, begin_s,
    end_s.
    """
    first, schedules = numbers.iloc[0], list(dict.fromkeys(numbers["schedule"]))
    figure, (axes,) = parts.figure_of_rows([human(each) for each in schedules], row_inches=0.5)
    for place, schedule in enumerate(schedules):
        rows = numbers[numbers["schedule"] == schedule]
        for (what, tone), bars in rows.groupby(["what", rows["group"] % 2]):
            height, color = place + (0.2 if what == "exchange" else -0.2), TONES[str(what)][int(tone)]
            begin_ms, length_ms = 1e3 * bars["begin_s"], 1e3 * (bars["end_s"] - bars["begin_s"])
            axes.barh(height, length_ms, 0.34, begin_ms, color=color, edgecolor="white", lw=0.3)
        end_ms = 1e3 * rows["end_s"].max()
        axes.annotate(f"{three_digits(end_ms)} ms", (end_ms, place + 0.2), (3, 0), "data", "offset points", va="center")
    backward_ms = 1e3 * numbers.loc[numbers["what"] == "backward", "end_s"].max()
    axes.axvline(backward_ms, zorder=1.5, **look.TARGET_LINE)
    axes.set(xlim=(0, 1.1e3 * numbers["end_s"].max()), xlabel="ms since the start of backward")
    axes.grid(visible=False, axis="y")
    title = f"{human(first['model'])} on {first['network']}, {first['algorithm']}, {first['workers']} workers, dense; "
    title += "layers that share a message have one tone"
    names = {"backward of a layer": "backward", "all-reduce of a message": "exchange"}
    bars = [Patch(label=name, facecolor=TONES[what][0]) for name, what in names.items()]
    parts.head(figure, title, [*bars, Line2D([], [], label="end of backward", **look.TARGET_LINE)])
    return figure


def in_legend_of(method: object, schedule: object) -> str:
    """Return the name of a method with a schedule for legends: ``dense, exact plan``."""
    name = way_name(str(method), str(schedule), in_legend)
    return f"{'dense, ' if method == DENSE else ''}{name}"
