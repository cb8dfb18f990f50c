"""What an advice writes: the table, its numbers, and the figure of time over the rate of the link."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config.units import three_digits
from experiments.reports import figure_parts as parts
from experiments.reports.figure_parts import Content, Panel
from experiments.reports.markdown import Column, Columns, table_of
from experiments.reports.names import human, label
from experiments.reports.plot_style import TARGET_LINE, lines_of, style
from experiments.studies.advice.evidence import Evidence
from experiments.studies.advice.prediction import Form, Setting, over_rates
from experiments.studies.simulated_steps.method_choices import DENSE
from experiments.studies.simulated_steps.tables import rate_name

Answers = Mapping[float, pd.DataFrame]  # the rows of ``predict`` for a rate of the link
DRAWN = (1e7, 1e11)  # bits per second
COLUMNS: Columns = {
    "method": Column("name"),
    "density": Column("density", "{:g}"),
    "n": Column("num_seeds", "{:g}"),
    "epochs": Column("epochs", "{:.3g}"),
    "step, ms": Column("step_ms"),
    "time, of dense's": Column("time", "{:.3g}"),
    "pays below, bit/s": Column("border"),
}
HOW_TO_READ = """\
*Epochs* were measured: the mean until the measure of each of n seeds was first at {level} % of dense's end, at the
*density* at which this and the predicted step give the least time ({evidence}). *Step* is predicted, nothing was timed:
from when each gradient is ready and what each collective takes, {workers} workers, a ring, dense in DDP's buckets and
the others in one. *Time* is epochs times step, of dense's. Below the rate in *pays below* it is less than dense's at
this latency, at the density that is best there.
An epoch has as many steps for each method. Where the evidence is of another model, another number of workers or another
training than yours, a method may need another density: train a short run of your own."""


def report(evidence: Evidence, setting: Setting, answers: Answers, opening: str) -> str:
    """Return the advice in Markdown, a table for each rate of the link."""
    words = HOW_TO_READ.format(level=evidence.level, evidence=evidence.words, workers=setting.world_size)
    blocks = [opening.strip(), textwrap.fill(words, 120), *(_section(setting, *answer) for answer in answers.items())]
    rows = next(iter(answers.values()))
    others = [f"- {_name(row)}: {row['why']}." for _, row in rows[rows["why"] != ""].iterrows()]
    if others:
        blocks.append("Of these nothing can be said:\n\n" + "\n".join(others))
    return "\n\n".join(blocks) + "\n"


def files(
    evidence: Evidence, setting: Setting, answers: Answers, forms: Sequence[Form], page: str
) -> Iterator[tuple[str, Content]]:
    """Yield the name of each file, and what is in it: the page, its numbers, and the figure."""
    yield "advice", page
    yield "advice", pd.concat([rows.assign(rate=rate) for rate, rows in answers.items()], ignore_index=True)
    lines = over_rates(forms, [float(rate) for rate in np.geomspace(*DRAWN, 41)])
    if len(lines):
        heading = (
            f"Time to {evidence.level} % of dense's end: {human(setting.trace.model)}, {setting.world_size} workers, "
            f"{1e6 * setting.latency_s:g} us a message; epochs of {evidence.words}"
        )
        yield "advice-rates", (draw(lines, heading), lines)


def _section(setting: Setting, rate: float, rows: pd.DataFrame) -> str:
    known = rows[rows["why"] == ""]
    link = f"{rate / 1e6:g} Mbit/s with {1e6 * setting.latency_s:g} us a message"
    is_dense, borders = known["method"] == DENSE, known["border"].map(rate_name, na_action="ignore")
    words: dict[str, Any] = {
        "name": [f"{_name(row)}{', DDP' if row['method'] == DENSE else ''}" for _, row in known.iterrows()],
        "density": known["density"].where(~is_dense),
        "step_ms": (1e3 * known["step_s"]).map(three_digits),
        "border": borders.where(~is_dense, ""),
    }
    shown = table_of(known.assign(**words), COLUMNS)
    return f"## {human(setting.trace.model)}, {setting.world_size} workers, {link}\n\n{shown}"


@style()
def draw(lines: pd.DataFrame, heading: str) -> Figure:
    """Time to the level, of dense's, over the rate of the link, a line per method."""
    forms = lines_of(zip(lines["method"], lines["variant"], strict=True))
    named = parts.named_lines(["method", "variant"], forms, label)

    def show_rates(axis: XAxis | YAxis) -> None:
        parts.plain_log(axis)
        axis.set_major_formatter(lambda value, _: rate_name(value))

    panel = Panel(
        x="rate",
        y="time",
        x_name="rate of a link, bit/s",
        y_name="time, of dense's",
        show_x=show_rates,
        show_y=parts.plain_log,
        also=lambda axes, _: axes.axhline(1, **TARGET_LINE),
    )
    dense = Line2D([], [], label=label(DENSE), **TARGET_LINE)
    return parts.figure_of_lines(heading, lines, [panel], named, [dense], height=3.4)


def _name(row: pd.Series) -> str:
    return label(str(row["method"]), str(row["variant"]))
