"""The networks of a simulation: each name given, with each algorithm of the all-reduce."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, get_args

from experiments.config.errors import UserError
from experiments.studies.simulated_steps.network_files import load_network
from experiments.studies.simulated_steps.networks import NetworkPreset, Nodes
from micro.planning.collectives import Algorithm
from micro.planning.costs import Network, best_of
from micro.planning.documents import BadFile
from micro.planning.tables import LinkTable, SelectTable
from micro.planning.traces import Trace

AlgorithmChoice: TypeAlias = Algorithm | Literal["hierarchical", "best"]
ALGORITHMS: tuple[AlgorithmChoice, ...] = (*get_args(Algorithm), "hierarchical", "best")
File = TypeVar("File", Trace, LinkTable, SelectTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChoice:
    """A network with an algorithm of the all-reduce.

    Attributes:
        name, algorithm: for titles.
        workers: numbers of workers that it is for.
        of: returns its costs for one of them.
    """

    name: str
    algorithm: str
    workers: Sequence[int]
    of: Callable[[int], Network]


def network_choices(
    name: str, algorithms: Sequence[AlgorithmChoice | None], nodes: Nodes, workers: tuple[int, ...]
) -> list[NetworkChoice]:
    """Return a network of conf/network, of a yaml or of a measured table, once with each algorithm.

    Raises:
        UserError: no such network, or a value of it is missing.
    """
    if Path(name).suffix == ".json":
        measured = load_measured(LinkTable, Path(name))
        sizes = (measured.world_size,)
        return [NetworkChoice(name=Path(name).stem, algorithm="measured", workers=sizes, of=lambda _: measured)]
    preset = load_network(name)
    choices = [
        NetworkChoice(
            name=preset.name,
            algorithm=algorithm or preset.algorithm,
            workers=workers,
            of=partial(_costs, preset, algorithm, nodes),
        )
        for algorithm in algorithms
    ]
    for each, world_size in itertools.product(choices, workers):
        each.of(world_size)  # a missing value is an error before anything is computed
    return choices


def _costs(preset: NetworkPreset, algorithm: AlgorithmChoice | None, nodes: Nodes, world_size: int) -> Network:
    if algorithm == "hierarchical":
        return nodes.network(preset, world_size)
    if algorithm == "best":
        return best_of(preset.network(world_size, each) for each in get_args(Algorithm))
    return preset.network(world_size, algorithm)


def load_measured(kind: type[File], path: Path) -> File:
    """Return what a file holds. Raises: UserError when it cannot be used."""
    try:
        return kind.load(path)
    except BadFile as error:
        raise UserError(str(error)) from None
