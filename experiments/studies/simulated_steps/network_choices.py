"""The networks of a simulation: each name given, with each algorithm of the all-reduce."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

from experiments.config.errors import UserError
from experiments.studies.simulated_steps.networks import NetworkPreset, Nodes, known_networks, load_network
from micro.planning.collectives import Algorithm
from micro.planning.costs import Network, best_of
from micro.planning.documents import BadFile
from micro.planning.tables import LinkTable, SelectTable
from micro.planning.traces import Trace

HIERARCHICAL, BEST = "hierarchical", "best"
ALGORITHMS = (*get_args(Algorithm), HIERARCHICAL, BEST)
INTRA, RANKS_PER_NODE = "v100_pcie", 8  # of nodes that --algorithm hierarchical asks for
File = TypeVar("File", Trace, LinkTable, SelectTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a command line says of nodes.

    Attributes:
        intra, ranks_per_node: None: as the network's file has them.
        two_level: whether methods are simulated in two levels too.
    """

    intra: str | None = None
    ranks_per_node: int | None = None
    two_level: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChoice:
    """A network with an algorithm of the all-reduce.

    Attributes:
        name, algorithm: for titles.
        workers: numbers of workers that it is for.
        of: returns its costs for one of them.
        nodes: that the workers are in; None: they reach each other alike.
    """

    name: str
    algorithm: str
    workers: Sequence[int]
    of: Callable[[int], Network]
    nodes: Nodes | None = None


def network_choices(
    name: str, algorithms: Sequence[str | None], options: NodeOptions, workers: tuple[int, ...]
) -> Iterator[NetworkChoice]:
    """Yield a network of conf/network, of a yaml or of a measured table, once with each algorithm; None: its own.

    Raises:
        UserError: no such network, a value of it is missing, or workers that do not fill its nodes.
    """
    if Path(name).suffix == ".json":
        if options.two_level:
            raise UserError(_one_link(Path(name).stem))
        measured = load_measured(LinkTable, Path(name))
        yield NetworkChoice(
            name=Path(name).stem, algorithm="measured", workers=(measured.world_size,), of=lambda _: measured
        )
        return
    preset = load_network(name)
    for algorithm in algorithms:
        named, nodes = algorithm or preset.algorithm, nodes_of(preset, algorithm, options)
        choice = NetworkChoice(
            name=preset.name, algorithm=named, workers=workers, of=_costs(preset, named, nodes), nodes=nodes
        )
        for world_size in workers:
            choice.of(world_size)  # a missing value is an error before anything is computed
        yield choice


def nodes_of(preset: NetworkPreset, algorithm: str | None, options: NodeOptions) -> Nodes | None:
    """Return the nodes that the workers are in: where the network joins nodes, or the command line asks for them.

    Raises:
        UserError: nothing says what joins the ranks of a node, or how many they are.
    """
    if not (preset.nodes or options.two_level or algorithm == HIERARCHICAL):
        return None
    intra, ranks_per_node = options.intra, options.ranks_per_node
    if preset.nodes:
        intra, ranks_per_node = intra or preset.nodes.intra, ranks_per_node or preset.nodes.ranks_per_node
    elif algorithm == HIERARCHICAL:
        intra, ranks_per_node = intra or INTRA, ranks_per_node or RANKS_PER_NODE
    if intra is None:
        raise UserError(_one_link(preset.name))
    if ranks_per_node is None:
        raise UserError(f"network {preset.name} has no nodes of its own: give --ranks-per-node with --intra")
    return Nodes(intra=load_network(intra), ranks_per_node=ranks_per_node)


def _costs(preset: NetworkPreset, algorithm: str, nodes: Nodes | None) -> Callable[[int], Network]:
    if nodes is not None:
        if algorithm not in ("ring", HIERARCHICAL):
            raise UserError(f"algorithm {algorithm} is not known for workers in nodes: use ring or hierarchical")
        return lambda world_size: nodes.network(preset, world_size, algorithm)  # type: ignore[arg-type]
    if algorithm == BEST:
        return lambda world_size: best_of(preset.network(world_size, each) for each in get_args(Algorithm))
    return lambda world_size: preset.network(world_size, algorithm)


def _one_link(name: str) -> str:
    """Return what is wrong with a network that has no link within nodes."""
    joining = "|".join(known for known in known_networks() if load_network(known).nodes)
    return (
        f"network {name} has one link, and two levels need one within nodes too: give --intra and --ranks-per-node, or "
        f"--network {joining}"
    )


def load_measured(kind: type[File], path: Path) -> File:
    """Return what a file holds. Raises: UserError when it cannot be used."""
    try:
        return kind.load(path)
    except BadFile as error:
        raise UserError(str(error)) from None
