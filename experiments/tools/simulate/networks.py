"""The networks of a simulation: those of conf/networks.yaml, scaled to any number of ranks, or a measured table."""

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

MEASURED = "measured"  # of a table
ALGORITHMS = (*costs.ALGORITHMS, HIERARCHICAL, BEST)
INTRA, RANKS_PER_NODE = "v100_pcie", 8  # of nodes that --algorithm hierarchical asks for
File = TypeVar("File", Trace, LinkTable, SelectTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChoice:
    """A network with an algorithm of the all-reduce: ``of`` gives its costs for a number of workers, in ``nodes``."""

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
    """Yield a network of conf/networks.yaml, of a yaml or of a measured table, once with each algorithm; None: its own.

    ``two_level`` says that nodes are needed whatever the algorithm.

    Raises:
        UserError: no such network, a value of it is missing, or workers that do not fill its nodes.
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
            of(world_size)  # a missing value is an error before anything is computed
        yield NetworkChoice(name=preset.name, algorithm=algorithm, workers=workers, of=of, nodes=nodes)


def nodes_of(preset: NetworkPreset, algorithm: str, intra: str | None, ranks_per_node: int | None) -> Nodes:
    """Return the nodes that workers are in: as given, else as the network's file has it.

    Raises:
        UserError: nothing says what joins the ranks of a node, or how many they are.
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
    """Return what a file of experiments.profile holds. Raises: UserError: it cannot be used."""
    with as_user_error(BadFile):
        return kind.load(path)
