"""The table of waits between updates, and the figure."""

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.reports.figure_parts import figure_of_rows, head, plain_log
from experiments.reports.markdown import table
from experiments.reports.names import label
from experiments.reports.plot_style import lines_of, style

HOW_TO_READ = """\
For each parameter and method: *steps per update* of the element in the middle, and of the one that a tenth of the
elements wait longer than (*90 %*), then the share of elements that no step updated. "never": that element had no
update. Dense shows what there is to update: elements without a gradient (rows of a table whose user, item or word did
not occur) are updated by no method. Parameters are in the order in which backward makes their gradients.
"""


def report(rows: pd.DataFrame, opening: str) -> str:
    """Write the rows of ``measured`` as a table: a row per parameter and the whole model, a column per method."""
    methods = list(dict.fromkeys(rows["method"]))
    steps = rows[["median", "tail"]].map(lambda wait: f"{wait:.3g}" if wait < math.inf else "never")
    cells = steps["median"] + " / " + steps["tail"] + " / " + rows["never"].map(lambda never: f"{100 * never:.0f} %")
    names = "`" + rows["parameter"] + "`"
    by_parameter = rows.assign(cell=cells, name=names).pivot(index="name", columns="method", values="cell")
    sizes = rows.groupby(names, sort=False)["numel"].first()
    own = zip(sizes, by_parameter.loc[sizes.index, methods].to_numpy(), strict=True)
    lines = [[str(name), f"{numel:,}", *cells] for name, (numel, cells) in zip(sizes.index, own, strict=True)]
    never = (rows["never"] * rows["numel"]).groupby(rows["method"]).sum() / sizes.sum()
    lines.append(["all", f"{sizes.sum():,}", *(f"{100 * never[method]:.1f} %" for method in methods)])
    columns = ["parameter", "elements", *map(label, methods)]
    return "\n".join([opening, HOW_TO_READ, table(columns, lines), ""])


@style()
def draw(rows: pd.DataFrame, title: str) -> Figure:
    """A line per parameter and method, from the median wait to 90 %, where there is one; beside it what never was."""
    methods, names = list(dict.fromkeys(rows["method"])), list(dict.fromkeys(rows["parameter"]))
    figure, (left, right) = figure_of_rows(names, 2, row_inches=0.05 * (len(methods) + 2))
    colors = {method: line["color"] for method, line in lines_of(methods).items()}
    for number, method in enumerate(methods):
        own, color = rows[rows["method"] == method].set_index("parameter").loc[names], colors[method]
        heights = [place + 0.8 * ((number + 0.5) / len(methods) - 0.5) for place in range(len(names))]
        median = own["median"].where(own["median"] < math.inf)
        tail = own["tail"].where(own["tail"] < math.inf, own["median"]).where(median.notna())
        left.hlines(heights, median, tail, color=color, linewidth=1)
        left.plot(median, heights, color=color, linestyle="none", marker="o", markersize=2.5)
        right.barh(heights, 100 * own["never"], 0.8 / len(methods), color=color)
    left.set_xlabel("steps per update: median to 90 %")
    right.set_xlabel("never updated, % of elements")
    plain_log(left.xaxis)
    head(figure, title, [Patch(label=label(method), color=color) for method, color in colors.items()])
    return figure
