"""The networks of a simulation: from conf/networks.yaml, scaled to any number of ranks, or from a measured table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from experiments.config.errors import UserError, as_user_error
from experiments.config.networks import BEST, HIERARCHICAL, NetworkPreset, Nodes, known_networks, load_network
from experiments.planning import costs
from experiments.planning.costs import Network
from experiments.planning.documents import BadFile
from experiments.planning.tables import LinkTable, SelectTable
from experiments.planning.traces import Trace

MEASURED = "measured"  # name of a measured table
ALGORITHMS = (*costs.ALGORITHMS, HIERARCHICAL, BEST)
INTRA, RANKS_PER_NODE = "v100_pcie", 8  # default nodes for --algorithm hierarchical
File = TypeVar("File", Trace, LinkTable, SelectTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChoice:
    """A network with an all-reduce algorithm: ``of`` returns the cost model for a number of workers, in ``nodes``."""

    name: str
    algorithm: str
    workers: Sequence[int]
    of: Callable[[int], Network]
    nodes: Nodes | None = None


def network_choices(
    name: str,
    algorithms: Sequence[str | None],
    workers: tuple[int, ...],
    *,
    intra: str | None = None,
    ranks_per_node: int | None = None,
    two_level: bool = False,
) -> Iterator[NetworkChoice]:
    """Yield a network (of conf/networks.yaml, a yaml or a measured table) with each algorithm; None: its default.

    ``two_level``: nodes are required with any algorithm.

    Raises:
        UserError: no such network, a missing value, or workers that do not fill its nodes.
    """
    if Path(name).suffix == ".json":
        if two_level:
            raise UserError(_one_link(Path(name).stem))
        table = load_measured(LinkTable, Path(name))
        yield NetworkChoice(name=Path(name).stem, algorithm=MEASURED, workers=(table.world_size,), of=lambda _: table)
        return
    preset = load_network(name)
    for given in algorithms:
        algorithm, nodes = given or preset.algorithm, None
        if preset.nodes or two_level or algorithm == HIERARCHICAL:
            nodes = nodes_of(preset, algorithm, intra, ranks_per_node)
            if algorithm not in ("ring", HIERARCHICAL):
                raise UserError(f"algorithm {algorithm} is not known for workers in nodes: use ring or hierarchical")
        of: Callable[[int], Network] = partial(preset.network, algorithm=algorithm)
        if nodes:
            of = partial(preset.node_network, nodes, algorithm)
        for world_size in workers:
            of(world_size)  # reports a missing value before anything is computed
        yield NetworkChoice(name=preset.name, algorithm=algorithm, workers=workers, of=of, nodes=nodes)


def nodes_of(preset: NetworkPreset, algorithm: str, intra: str | None, ranks_per_node: int | None) -> Nodes:
    """Return the nodes of the workers: as given, otherwise from the network's file.

    Raises:
        UserError: the network within a node, or the number of its ranks, is unknown.
    """
    own = preset.nodes
    if own is None and algorithm == HIERARCHICAL:
        own = Nodes(intra=INTRA, ranks_per_node=RANKS_PER_NODE)
    if own is not None:
        intra, ranks_per_node = intra or own.intra, ranks_per_node or own.ranks_per_node
    if intra is None:
        raise UserError(_one_link(preset.name))
    if ranks_per_node is None:
        raise UserError(f"network {preset.name} has no nodes of its own: give --ranks-per-node with --intra")
    return Nodes(intra=intra, ranks_per_node=ranks_per_node)


def _one_link(name: str) -> str:
    joining = "|".join(known for known in known_networks() if load_network(known).nodes)
    return (
        f"network {name} has one link, and two levels need one within nodes too: give --intra and --ranks-per-node, or "
        f"--network {joining}"
    )


def load_measured(kind: type[File], path: Path) -> File:
    """Read a file of experiments.profile. Raises: UserError: it cannot be used."""
    with as_user_error(BadFile):
        return kind.load(path)
