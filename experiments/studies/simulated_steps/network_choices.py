"""The networks of a simulation: each name given, with each algorithm of the all-reduce."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, get_args

from experiments.config.errors import UserError
from experiments.studies.simulated_steps.network_files import load_network, nodes_of, one_link
from experiments.studies.simulated_steps.networks import NetworkPreset, Nodes, NodeValues
from micro.planning.collectives import Algorithm
from micro.planning.costs import Network, best_of
from micro.planning.documents import BadFile
from micro.planning.tables import LinkTable, SelectTable
from micro.planning.traces import Trace

AlgorithmChoice: TypeAlias = Algorithm | Literal["hierarchical", "best"]
ALGORITHMS: tuple[AlgorithmChoice, ...] = (*get_args(Algorithm), "hierarchical", "best")
INTRA, RANKS_PER_NODE = "v100_pcie", 8
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
    name: str, algorithms: Sequence[AlgorithmChoice | None], options: NodeOptions, workers: tuple[int, ...]
) -> list[NetworkChoice]:
    """Return a network of conf/network, of a yaml or of a measured table, once with each algorithm.

    Raises:
        UserError: no such network, a value of it is missing, or workers that do not fill its nodes.
    """
    if Path(name).suffix == ".json":
        return [_measured(Path(name), options)]
    preset = load_network(name)
    choices = [_choice(preset, algorithm, options, workers) for algorithm in algorithms]
    for each, world_size in itertools.product(choices, workers):
        each.of(world_size)  # a missing value is an error before anything is computed
    return choices


def _measured(path: Path, options: NodeOptions) -> NetworkChoice:
    if options.two_level:
        raise UserError(one_link(path.stem))
    measured = load_measured(LinkTable, path)
    return NetworkChoice(name=path.stem, algorithm="measured", workers=(measured.world_size,), of=lambda _: measured)


def _choice(
    preset: NetworkPreset, algorithm: AlgorithmChoice | None, options: NodeOptions, workers: tuple[int, ...]
) -> NetworkChoice:
    named, nodes = algorithm or preset.algorithm, _nodes(preset, algorithm, options)
    costs: Callable[[int], Network]
    if nodes is None:
        costs = partial(_costs, preset, algorithm)
    elif named in ("ring", "hierarchical"):
        costs = partial(nodes.network, preset, algorithm=named)
    else:
        raise UserError(f"algorithm {named} is not known for workers in nodes: use ring or hierarchical")
    return NetworkChoice(name=preset.name, algorithm=named, workers=workers, of=costs, nodes=nodes)


def _nodes(preset: NetworkPreset, algorithm: AlgorithmChoice | None, options: NodeOptions) -> Nodes | None:
    """Return the nodes that the workers are in: where the network joins nodes, or the command line asks for them."""
    if not (preset.nodes or options.two_level or algorithm == "hierarchical"):
        return None
    default = NodeValues(ranks_per_node=RANKS_PER_NODE, intra=INTRA) if algorithm == "hierarchical" else None
    return nodes_of(preset, intra=options.intra, ranks_per_node=options.ranks_per_node, default=default)


def _costs(preset: NetworkPreset, algorithm: AlgorithmChoice | None, world_size: int) -> Network:
    if algorithm == "best":
        return best_of(preset.network(world_size, each) for each in get_args(Algorithm))
    assert algorithm != "hierarchical"
    return preset.network(world_size, algorithm)


def load_measured(kind: type[File], path: Path) -> File:
    """Return what a file holds. Raises: UserError when it cannot be used."""
    try:
        return kind.load(path)
    except BadFile as error:
        raise UserError(str(error)) from None
