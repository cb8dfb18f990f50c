"""The report of one level beside two, in Markdown."""

from itertools import product

import pandas as pd

from experiments.reports.names import human, in_order, label
from experiments.studies.simulated_steps.levels import LEVELS
from experiments.studies.simulated_steps.settings import Study
from experiments.studies.simulated_steps.tables import Show, by_workers

HOW_TO_READ = """\
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
SHOWN: dict[str, Show] = {
    "Step, ms": lambda row: f"{1e3 * row['step_s']:.4g}",
    "Speed-up": lambda row: f"{row['speedup']:.4g}",
    "Sent to other nodes, a worker and step, MB": lambda row: f"{row['between_bytes'] / 1e6:.3g}",
    "Sent within the node, a worker and step, MB": lambda row: f"{row['within_bytes'] / 1e6:.3g}",
    "Groups": lambda row: f"{row['num_groups']}",
}


def level_report(study: Study, levels: pd.DataFrame, command: str) -> str:
    """Return the report of ``levels``, rows of simulated_steps.levels.both_levels."""
    parts = ["# One level and two, simulated", f"`{command}`", HOW_TO_READ.rstrip()]
    parts.append(f"Density {study.density:g}. Seconds of selection: {study.selection}.")
    for network in {each.name: each for each in study.networks}.values():
        assert network.nodes is not None
        parts.append(
            f"*{network.name}*: nodes of {network.nodes.ranks_per_node} workers, or one of fewer; "
            f"{network.nodes.intra.name} within them."
        )
    for (model, network_name, algorithm, compute_s), rows in levels.groupby(
        ["model", "network", "algorithm", "compute_s"], sort=False
    ):
        parts.append(f"## {human(str(model))} on {network_name}, {algorithm}, {compute_s:.3g} s of computation")
        parts.append(f"Computation {study.assumed[str(model)]}.")
        pairs = product(in_order(rows["method"]), LEVELS)
        ways: dict[tuple[str, str], str] = {(method, count): f"{label(method)}, {count}" for method, count in pairs}
        parts += [f"{name}:\n\n{by_workers(rows, ways, ['method', 'levels'], show)}" for name, show in SHOWN.items()]
    return "\n\n".join(parts) + "\n"
