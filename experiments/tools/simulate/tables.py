"""Write the reports of simulated steps in Markdown."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import pandas as pd

from experiments.config.networks import load_network
from experiments.config.units import human_count
from experiments.reports.names import human, in_order, label
from experiments.tools.shared.markdown import Column, Columns, table
from experiments.tools.simulate.method_choices import DENSE
from experiments.tools.simulate.published_gains import PUBLISHED, nearest
from experiments.tools.simulate.setup import Setup

SETTING = ["model", "network", "algorithm", "compute_s"]
SPEEDUP, GROUPS = Column("speedup", "{:.4g}"), Column("num_groups")
STEPS: Columns = {"Speed-up": SPEEDUP, "Exposed, ms": Column("exposed_s", "{:.3g}", 1e3), "Groups": GROUPS}
LEVELS: Columns = {
    "Step, ms": Column("step_s", "{:.4g}", 1e3),
    "Speed-up": SPEEDUP,
    "Sent to other nodes, a worker and step, MB": Column("between_bytes", "{:.3g}", 1e-6),
    "Sent within the node, a worker and step, MB": Column("within_bytes", "{:.3g}", 1e-6),
    "Groups": GROUPS,
}
HOW_TO_READ = """\
Nothing was trained: a trace gives each gradient's bytes and the moment it is ready, a model of a network what a
collective takes, a schedule which gradients travel together. Gradients travel one group after the other. *Speed-up* is
over one worker, which neither sends nor selects: workers x computation / step. *Groups* are collectives' worth of
gradients. *Exposed* is the communication that backward does not hide. Selection takes the processor, and delays the
rest of backward; under *exact* the plan knows of it. What a sparse method sends is counted for a steady step.
"""
HOW_LEVELS = """\
Nothing was trained. *One level*: all workers exchange as one group. *Two levels*: gradients are averaged densely within
a node, each worker exchanges its shard with those of the same place in other nodes by the method, and the updates are
shared within the node (`micro.TwoLevel`). Both travel in groups by the exact plan for them, one group after the other.
*Speed-up* is over one worker.

*Ring*: collectives of all workers know nothing of nodes: a ring in the order of workers, which is as slow as its
messages between nodes, and lists sent pairwise, which share the node's interface with those of all its workers.
*Hierarchical*: collectives of all workers are divided by level, so that data which must leave a node leaves it once.
Two levels call the same under both.

Selection takes the processor and is counted before the exchange. In two levels it is from a shard, and taking shards
apart and together reads and writes 20 bytes an element. What a method sends is counted for a steady step.
"""
HIERARCHY = """\
*Hierarchical*: nodes of {} workers, or one of fewer; {} is the network within a node, by ring, and the one named the
network between nodes. An all-reduce is a reduce-scatter in the node, one across nodes, an all-gather in the node."""
HOW_BORDERS = """\
Bandwidth of a link up to which a step of the method is shorter than one of dense, both with exact plans."""
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


def way_name(method: str, schedule: str, name_of: Callable[[str], str] = label) -> str:
    """Return the name of a method with a schedule; for dense, only the schedule's."""
    return human(schedule) if method == DENSE else f"{name_of(method)}, {human(schedule)}"


def rate_name(value: float) -> str:
    """Return bits per second as a text: ``100M``, ``10G``; never or always if there is no border."""
    if value in (0, math.inf):
        return "always" if value else "never"
    return human_count(value)


def speedups(steps: pd.DataFrame) -> str:
    """Return tables of speed-ups and, in brackets, numbers of groups, per model, network and algorithm."""
    cells = steps["speedup"].map("{:.4g}".format) + steps["num_groups"].map(" ({})".format)
    settings = steps.assign(cell=cells).groupby(SETTING, sort=False)
    return "\n\n".join(f"## {_title(key)}\n\n{_by_workers(own, 'schedule', way_name)}" for key, own in settings)


def report(setup: Setup, frames: Mapping[str, pd.DataFrame], command: str) -> str:
    """Return the report of a setup in Markdown."""
    parts = ["# Simulated steps", f"`{command}`", HOW_TO_READ + f"\nSeconds of selection: {setup.selection}."]
    nodes = [network.nodes for network in setup.networks if network.nodes and network.algorithm == "hierarchical"]
    parts += dict.fromkeys(HIERARCHY.format(each.ranks_per_node, load_network(each.intra).name) for each in nodes)
    parts += _sections(frames["steps"], "schedule", way_name, STEPS, setup.assumed)
    if "headline" in frames:
        parts += ["## Gains of merged gradients beside the published", HOW_GAINS + "\n" + _gains(frames["headline"])]
    if "borders" in frames:
        parts += ["## Where a method stops paying", HOW_BORDERS, _borders(frames["borders"])]
    return "\n\n".join(parts) + "\n"


def level_report(setup: Setup, levels: pd.DataFrame, command: str) -> str:
    """Return the report that compares one level with two."""
    parts = ["# One level and two, simulated", f"`{command}`", HOW_LEVELS.rstrip()]
    parts.append(f"Density {setup.density:g}. Seconds of selection: {setup.selection}.")
    for name, nodes in {each.name: each.nodes for each in setup.networks if each.nodes}.items():
        within = f"{load_network(nodes.intra).name} within them"
        parts.append(f"*{name}*: nodes of {nodes.ranks_per_node} workers, or one of fewer; {within}.")
    order = in_order(levels["method"])
    levels = levels.sort_values("method", key=lambda names: names.map(order.index), kind="stable")
    parts += _sections(levels, "levels", lambda method, count: f"{label(method)}, {count}", LEVELS, setup.assumed)
    return "\n\n".join(parts) + "\n"


def _sections(
    rows: pd.DataFrame, kind: str, name: Callable[[str, str], str], shown: Columns, assumed: Mapping[str, str]
) -> Iterator[str]:
    """Yield for each model, network and algorithm a heading, and a table for each of ``shown``."""
    for setting, own in rows.groupby(SETTING, sort=False):
        yield f"## {_title(setting)}"
        yield f"Computation {assumed[str(setting[0])]}."
        for title, column in shown.items():
            yield f"{title}:\n\n{_by_workers(own.assign(cell=own[column.key].map(column.cell)), kind, name)}"


def _by_workers(rows: pd.DataFrame, kind: str, name: Callable[[str, str], str]) -> str:
    """Return the column ``cell`` as a table: a row per number of workers, a column per method and ``kind``."""
    ways = list(dict.fromkeys(zip(rows["method"], rows[kind], strict=True)))
    cells = rows.pivot(index="workers", columns=["method", kind], values="cell")[ways]
    return table(["workers", *(name(*way) for way in ways)], cells.set_axis(cells.index.map(str)).itertuples(name=None))


def _title(setting: tuple[Hashable, ...]) -> str:
    model, network, algorithm, compute_s = setting
    return f"{human(str(model))} on {network}, {algorithm}, {compute_s:.3g} s of computation"


def nearest_gains(headline: pd.DataFrame) -> pd.DataFrame:
    """Return the row of each reading with the computation nearest to the published gains; ``away`` is how far both are.

    most_layerwise and most_single are the largest gains of that reading.
    """
    found = []
    for (model, _, _), rows in headline.groupby(["model", "grain", "fitted_at"], sort=False):
        records: list[dict[str, Any]] = rows.to_dict("records")  # type: ignore[assignment]
        best = nearest(records, PUBLISHED[str(model)])
        away = math.hypot(*(best[f"over_{name}"] / best[f"published_{name}"] - 1 for name in ("layerwise", "single")))
        most = {f"most_{name}": rows[f"over_{name}"].max() for name in ("layerwise", "single")}
        found.append(best | {"away": away} | most)
    return pd.DataFrame(found)


def _gains(headline: pd.DataFrame) -> str:
    lines = []
    for best in nearest_gains(headline).to_dict("records"):
        reading = f"{human(best['model'])}, by {best['grain']} ({best['num_sent']}), fit of {best['fitted_at']}"
        published = [f"{best[name]:g}" for name in ("published_layerwise", "published_single")]
        ours = ("compute_s", "over_layerwise", "over_single", "most_layerwise", "most_single")
        lines.append([reading, *published, *(f"{best[name]:.3g}" for name in ours)])
    names = ["reading", "published / WFBP", "published / SyncEASGD", "nearest, s", "ours", "ours", "largest", "largest"]
    return table(names, lines)


def _borders(borders: pd.DataFrame) -> str:
    methods, rows = in_order(borders["method"]), borders["model"].map(human) + borders["workers"].map(", {}".format)
    rates = borders.assign(cell=borders["border"].map(rate_name), row=rows)
    cells = rates.pivot(index="row", columns="method", values="cell").loc[rows.unique(), methods]
    return table(["model, workers", *(f"{label(name)}, bit/s" for name in methods)], cells.itertuples(name=None))
