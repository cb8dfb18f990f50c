"""The figure of an ablation: what each form reached, its spread, and what it sent."""

from collections.abc import Collection

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reports.figure_parts import head, new_figure, plain_log, show_metric
from experiments.reports.measures import metric_of
from experiments.reports.names import label
from experiments.reports.plot_style import BLACK, PAGE_INCHES, TARGET_LINE, LineSettings, highlight, plain, style

FORM = ["density", "sparsifier", "form"]
OTHER: LineSettings = {
    "marker": "o",
    "markersize": 3.0,
    "markerfacecolor": "none",
    "markeredgewidth": 0.6,
    "linestyle": "none",
}


@style()
def draw_forms(rows: pd.DataFrame, title: str) -> Figure:
    """A line per form, the best on top: the measure with the range over seeds, and the bytes as a share of dense's.

    Args:
        rows: a row per form and rate, the best first; of a form that has several the first is drawn with its range and
            its bytes, the others as small rings.
    """
    metric = metric_of(rows["metric"])
    usual = rows[rows["sparsifier"] != "dense"]["density"].mode()
    forms = [own for _, own in rows.groupby(FORM, sort=False)]
    figure = new_figure(PAGE_INCHES, 0.9 + 0.16 * len(forms))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for height, own in enumerate(forms):
        best, color = own.iloc[0], highlight(str(own["sparsifier"].iloc[0]))
        left.hlines(height, best["low"], best["high"], color=color, linewidth=0.8)
        left.plot(best["value"], height, color=color, marker="o")
        left.plot(own["value"].iloc[1:], [height] * (len(own) - 1), color=color, **OTHER)
        right.plot(100 * best["of_dense"], height, color=color, marker="o")
    dense = rows[rows["of_dense"] == 1]["value"]
    left.axvline(dense.max() if metric.higher_is_better else dense.min(), **TARGET_LINE)
    left.set_yticks(range(len(forms)), [plain(_name(own, set(usual))) for own in forms])
    left.set_ylim(len(forms) - 0.5, -0.5)
    show_metric(left.xaxis, metric)
    right.set(xlabel="sent, % of dense")
    right.margins(x=0.1)
    plain_log(right.xaxis)
    handles = [Line2D([], [], label="dense, at the best of its rates", **TARGET_LINE)]
    if len(rows) > len(forms):
        handles.append(Line2D([], [], label="the form at its other rates", color=BLACK, **OTHER))
    head(figure, f"{title}: mean and range over seeds", handles)
    return figure


def _name(form: pd.DataFrame, usual: Collection[float]) -> str:
    """Return what a form is called: what it changes, its density where that is not usual, the best of its rates."""
    best = form.iloc[0]
    density = "" if best["sparsifier"] == "dense" or best["density"] in usual else f"density={best['density']:g}"
    changed = ", ".join(word for word in (density, str(best["form"])) if word)
    of = f", best of {len(form)}" if len(form) > 1 else ""
    return f"{label(best['sparsifier'], changed)}, rate {best['rate']:g}{of}"
