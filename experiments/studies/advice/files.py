"""What an advice writes: the table, its numbers, and the figure of time over the rate of the link."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reports.csv_files import write_csv
from experiments.reports.figure_parts import handles_of, head, new_figure, plain_log, save
from experiments.reports.markdown import table
from experiments.reports.names import human, label
from experiments.reports.output import write_file
from experiments.reports.plot_style import PAGE_INCHES, TARGET_LINE, lines_of, style
from experiments.studies.advice.evidence import Evidence
from experiments.studies.advice.prediction import Form, Setting, over_rates
from experiments.studies.simulated_steps.method_choices import DENSE
from experiments.studies.simulated_steps.tables import rate_name

Answers = Mapping[float, pd.DataFrame]  # the rows of ``predict`` for a rate of the link
DRAWN = (1e7, 1e11)  # bits per second
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


def write(
    evidence: Evidence, setting: Setting, answers: Answers, forms: Sequence[Form], out: Path, page: str
) -> list[Path]:
    """Write advice.md, advice.csv and the figure; return the paths."""
    rows = pd.concat([rows.assign(rate=rate) for rate, rows in answers.items()], ignore_index=True)
    paths = [write_file(out / "advice.md", page), write_csv(rows, out / "advice.csv")]
    lines = over_rates(forms, [float(rate) for rate in np.geomspace(*DRAWN, 41)])
    if lines.empty:
        return paths
    heading = (
        f"Time to {evidence.level} % of dense's end: {human(setting.trace.model)}, {setting.world_size} workers, "
        f"{1e6 * setting.latency_s:g} us a message; epochs of {evidence.words}"
    )
    return [*paths, *save(draw(lines, heading), lines, out / "advice-rates")]


def _section(setting: Setting, rate: float, rows: pd.DataFrame) -> str:
    name = rate_name(rate)
    link = f"{name[:-1]} {name[-1]}bit/s with {1e6 * setting.latency_s:g} us a message"
    heading = f"## {human(setting.trace.model)}, {setting.world_size} workers, {link}"
    names = ["method", "density", "n", "epochs", "step, ms", "time, of dense's", "pays below, bit/s"]
    return f"{heading}\n\n{table(names, [_cells(row) for _, row in rows[rows['why'] == ''].iterrows()])}"


@style()
def draw(lines: pd.DataFrame, heading: str) -> Figure:
    """Time to the level, of dense's, over the rate of the link, a line per method."""
    figure = new_figure(PAGE_INCHES, 3.4)
    axes = figure.subplots()
    of_forms = dict(list(lines.groupby(["method", "variant"], sort=False)))
    drawn = lines_of(of_forms)
    for key, line in drawn.items():
        axes.plot(of_forms[key]["rate"], of_forms[key]["time"], **line, markevery=8)
    handles = handles_of({label(*map(str, key)): line for key, line in drawn.items()})
    axes.axhline(1, **TARGET_LINE)
    axes.set(xlabel="rate of a link, bit/s", ylabel="time, of dense's")
    plain_log(axes.yaxis)
    plain_log(axes.xaxis)
    axes.xaxis.set_major_formatter(lambda value, _: rate_name(value))
    head(figure, heading, [Line2D([], [], label=label(DENSE), **TARGET_LINE), *handles])
    return figure


def _name(row: pd.Series) -> str:
    return label(str(row["method"]), str(row["variant"]))


def _cells(row: pd.Series) -> list[str]:
    is_dense = row["method"] == DENSE
    return [
        f"{_name(row)}{', DDP' if is_dense else ''}",
        "-" if is_dense else f"{row['density']:g}",
        f"{row['num_seeds']:g}",
        f"{row['epochs']:.3g}",
        f"{1e3 * row['step_s']:.3g}",
        f"{row['time']:.3g}",
        "" if is_dense else rate_name(row["border"]),
    ]
