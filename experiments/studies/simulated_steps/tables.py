"""The report of simulated steps, in Markdown."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import pandas as pd

from experiments.reports.markdown import table
from experiments.reports.names import human, in_order, label
from experiments.studies.simulated_steps.labels import rate_name, way_name
from experiments.studies.simulated_steps.published_gains import Published, nearest
from experiments.studies.simulated_steps.settings import Study

Show = Callable[[pd.Series], str]
SHOWN: dict[str, Show] = {
    "Speed-up": lambda row: f"{row['speedup']:.4g}",
    "Exposed, ms": lambda row: f"{1e3 * row['exposed_s']:.3g}",
    "Groups": lambda row: f"{row['num_groups']}",
}
SETTING = ["model", "network", "algorithm", "compute_s"]
HOW_TO_READ = """\
Nothing was trained: a trace gives each gradient's bytes and the moment it is ready, a model of a network what a
collective takes, a schedule which gradients travel together. Gradients travel one group after the other. *Speed-up* is
over one worker, which neither sends nor selects: workers x computation / step. *Groups* are collectives' worth of
gradients. *Exposed* is the communication that backward does not hide. Selection takes the processor, and delays the
rest of backward; under *exact* the plan knows of it. What a sparse method sends is counted for a steady step.
"""
HIERARCHY = """\
*Hierarchical*: nodes of {} workers, or one of fewer; {} is the network within a node, by ring, and the one named the
network between nodes. An all-reduce is a reduce-scatter in the node, one across nodes, an all-gather in the node."""
HOW_GAINS = """\
How much faster a step is with MG-WFBP than with WFBP and with SyncEASGD (one bucket): 64 workers, ring, the paper's
first cluster (a = 9.72e-4 s, b = 1.97e-9 s/B), forward taken as half of backward as in the authors' script. *Published*
is what Shi, Chu and Li report (MG-WFBP, TPDS 2021, arXiv 1912.09268). Each line is a reading of what the paper leaves
open: of how many ranks the fit is, and whether a layer's parameters travel as one. *Nearest* is the computation of a
worker, forward and backward, at which our two gains come nearest to the published ones; the largest gains are over all
computations tried, 0.03 to 10 s.

Why ours differ: the paper's layer times, taken on a K80, are not public. Ours have the architecture's sizes and the
proportions of another device, which spends other shares of backward on early and on late layers; the computation is
therefore an assumption, and the figure shows the gains for all. The paper counts 59 tensors in its GoogLeNet and 161 in
its ResNet-50; how many travel in each reading of ours stands in brackets.
"""


def speedups(steps: pd.DataFrame) -> str:
    """Return speed-ups and, in brackets, numbers of groups: a table per model, network and algorithm."""
    parts = []
    for setting, rows in steps.groupby(SETTING, sort=False):
        parts += [f"## {_title(setting)}", _by_ways(rows, lambda row: f"{row['speedup']:.4g} ({row['num_groups']})")]
    return "\n\n".join(parts)


def report(study: Study, frames: Mapping[str, pd.DataFrame], command: str) -> str:
    """Return the report of a study in Markdown."""
    parts = ["# Simulated steps", f"`{command}`", HOW_TO_READ + f"\nSeconds of selection: {study.selection}."]
    nodes = [network.nodes for network in study.networks if network.nodes and network.algorithm == "hierarchical"]
    parts += dict.fromkeys(HIERARCHY.format(each.ranks_per_node, each.intra.name) for each in nodes)
    for setting, rows in frames["steps"].groupby(SETTING, sort=False):
        parts += [f"## {_title(setting)}", f"Computation {study.assumed[str(setting[0])]}.", *_tables(rows)]
    if "headline" in frames:
        parts += ["## Gains of merged gradients beside the published", HOW_GAINS + "\n" + _gains(frames["headline"])]
    if "borders" in frames:
        text = (
            "Bandwidth of a link up to which a step of the method is shorter than one of dense, both with exact plans."
        )
        parts += ["## Where a method stops paying", text, _borders(frames["borders"])]
    return "\n\n".join(parts) + "\n"


def _title(setting: tuple[Hashable, ...]) -> str:
    model, network, algorithm, compute_s = setting
    return f"{human(str(model))} on {network}, {algorithm}, {compute_s:.3g} s of computation"


def by_workers(rows: pd.DataFrame, ways: Mapping[tuple[str, str], str], columns: Sequence[str], show: Show) -> str:
    """Return a table with a line for each number of workers.

    Args:
        ways: heading of each further column, by the values that its rows have in ``columns``.
    """
    lines = []
    for workers, some in rows.groupby("workers", sort=True):
        found = {tuple(row[column] for column in columns): show(row) for _, row in some.iterrows()}
        lines.append([str(workers), *(found[way] for way in ways)])
    return table(["workers", *ways.values()], lines)


def _tables(rows: pd.DataFrame) -> list[str]:
    return [f"{name}:\n\n{_by_ways(rows, show)}" for name, show in SHOWN.items()]


def _by_ways(rows: pd.DataFrame, show: Show) -> str:
    pairs = dict.fromkeys(zip(rows["method"], rows["schedule"], strict=True))
    return by_workers(rows, {pair: way_name(*pair) for pair in pairs}, ["method", "schedule"], show)


def _gains(headline: pd.DataFrame) -> str:
    lines = []
    for (model, grain, fitted_at), rows in headline.groupby(["model", "grain", "fitted_at"], sort=False):
        published = Published(
            over_layerwise=rows["published_layerwise"].iloc[0], over_single=rows["published_single"].iloc[0]
        )
        best = nearest([dict(row) for _, row in rows.iterrows()], published)
        lines.append(
            [
                f"{human(str(model))}, by {grain} ({best['num_sent']}), fit of {fitted_at}",
                f"{published.over_layerwise:g}",
                f"{published.over_single:g}",
                f"{best['compute_s']:.3g}",
                f"{best['over_layerwise']:.3g}",
                f"{best['over_single']:.3g}",
                f"{rows['over_layerwise'].max():.3g}",
                f"{rows['over_single'].max():.3g}",
            ]
        )
    names = ["reading", "published / WFBP", "published / SyncEASGD", "nearest, s", "ours", "ours", "largest", "largest"]
    return table(names, lines)


def _borders(borders: pd.DataFrame) -> str:
    methods = in_order(borders["method"])
    lines = [
        [
            f"{human(str(model))}, {workers}",
            *(rate_name(some[some["method"] == name]["border"].iloc[0]) for name in methods),
        ]
        for (model, workers), some in borders.groupby(["model", "workers"], sort=False)
    ]
    return table(["model, workers", *(f"{label(name)}, bit/s" for name in methods)], lines)
