"""The figure of bytes to accuracy: what each method had sent when it came to shares of dense's end."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config.units import human_bytes
from experiments.reports.figure_parts import head, new_figure, plain_log
from experiments.reports.names import label
from experiments.reports.plot_style import BLACK, PAGE_INCHES, LineSettings, highlight, plain, style

MARKS = {"90": "o", "95": "s", "99": "D"}  # percent of dense's end


@style()
def draw_bytes(rows: pd.DataFrame, title: str) -> Figure:
    """A line per method and density, the fewest bytes to the lowest share on top; takes rows of ``reached``.

    A mark is full where all seeds came there, hollow where some did, and missing where none did.
    """
    rows = rows.sort_values([f"bytes_{share}" for share in MARKS], na_position="last")
    figure = new_figure(PAGE_INCHES, 1.1 + 0.17 * len(rows))
    axes = figure.subplots()
    for height, (_, row) in enumerate(rows.iterrows()):
        color = highlight(str(row["sparsifier"]))
        axes.plot([row[f"bytes_{share}"] for share in MARKS], [height] * len(MARKS), color=color, linewidth=0.6)
        for share, marker in MARKS.items():
            is_all = row[f"num_{share}"] == row["num_seeds"]
            mark: LineSettings = {"marker": marker, "markerfacecolor": color if is_all else "white"}
            axes.plot(row[f"bytes_{share}"], height, color=color, linestyle="none", **mark)
    axes.set_yticks(range(len(rows)), [_name(row) for _, row in rows.iterrows()])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    plain_log(axes.xaxis)
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    axes.set_xlabel("sent by a worker until then")
    head(figure, title, [_handle(f"{share} % of dense's end", marker) for share, marker in MARKS.items()])
    return figure


def _name(row: pd.Series) -> str:
    density = "" if row["density"] == 1 else f", {row['density']:g}"
    return plain(f"{label(str(row['sparsifier']), str(row['form']))}{density}")


def _handle(text: str, marker: str) -> Line2D:
    return Line2D([], [], label=text, color=BLACK, marker=marker, linestyle="none")
