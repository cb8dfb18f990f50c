"""The networks of a simulation: those of conf/networks.yaml, scaled to any number of ranks, or a measured table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError, as_user_error, check_choice
from experiments.config.paths import CONF
from experiments.planning import costs
from experiments.planning.costs import Best, Flat, Link, Network, scaled
from experiments.planning.documents import BadFile, read_as
from experiments.planning.nodes import FlatOnNodes, Hierarchical, NodeNetwork
from experiments.planning.tables import LinkTable, SelectTable
from experiments.planning.traces import Trace

FITTED = ("all_reduce", "all_gather")
HIERARCHICAL, BEST = "hierarchical", "best"
MEASURED = "measured"  # of a table
NETWORKS = CONF / "networks.yaml"
ALGORITHMS = (*costs.ALGORITHMS, HIERARCHICAL, BEST)
INTRA, RANKS_PER_NODE = "v100_pcie", 8  # default nodes for --algorithm hierarchical
File = TypeVar("File", Trace, LinkTable, SelectTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fit alpha_s + beta_s x bytes: of an all-reduce's vector, or of all rows in an all-gather."""

    world_size: int
    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise ValueError(f"world_size must be at least 2, got {self.world_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkValues:
    """The parameters of a link; a copy of the file must set those that are None.

    ``alpha_s``, ``beta_s`` and ``gamma_s`` are seconds per message, per byte sent, and per byte added. By default
    beta_s follows from ``rate_bps``, bits per second on the link, and ``overhead``, bytes on the link per byte of
    payload.
    """

    alpha_s: float | None = None
    beta_s: float | None = None
    gamma_s: float = 0.0
    rate_bps: float | None = None
    overhead: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate_bps", "overhead"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be above 0, got 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a network: number of ranks, and the name in conf/networks.yaml of the network within a node."""

    ranks_per_node: int
    intra: str

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {self.ranks_per_node}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPreset:
    """A network from its file: fits of a collective for ascending numbers of ranks, or a link.

    Attributes:
        source: origin of the numbers.
        fitted, algorithm, fitted_on: the fitted collective, its assumed algorithm, and sizes of messages.
        nodes: joined by the network; None: equal links between all ranks.
    """

    name: str
    interconnect: str
    source: str
    fitted: str = "all_reduce"
    algorithm: str = "ring"
    fitted_on: str = "not stated"
    fits: tuple[Fit, ...] = ()
    link: LinkValues | None = None
    nodes: Nodes | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("fitted", FITTED), ("algorithm", costs.ALGORITHMS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got '{getattr(self, name)}'")
        if bool(self.fits) == (self.link is not None):
            raise ValueError("give either fits or a link")
        sizes = [fit.world_size for fit in self.fits]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"world_size of fits must rise, got {', '.join(map(str, sizes))}")

    def link_of(self, world_size: int) -> Link:
        """Return the link between ``world_size`` ranks, from the fit with the largest number of ranks up to that.

        Raises:
            UserError: a value of the link is missing.
        """
        if self.link is None:
            fit = [self.fits[0], *(fit for fit in self.fits if fit.world_size <= world_size)][-1]
            if self.fitted == "all_reduce":
                return scaled(fit.alpha_s, fit.beta_s, fit.world_size, self.algorithm)
            beta_s = fit.beta_s * fit.world_size  # one byte per rank is world_size bytes in all
            return scaled(fit.alpha_s, beta_s, fit.world_size, self.algorithm, op="gather_rows")
        link, missing = self.link, f"network {self.name} has no {{}}: put its entry and its name into a yaml, with {{}}"
        if link.alpha_s is None:
            raise UserError(missing.format("alpha_s, seconds a message", "alpha_s"))
        if link.beta_s is None and link.rate_bps is None:
            raise UserError(missing.format("rate", "rate_bps, bits a second, or beta_s"))
        beta_s = link.beta_s if link.beta_s is not None else 8 / (link.rate_bps or 1) * link.overhead
        return Link(link.alpha_s, beta_s, link.gamma_s)

    def network(self, world_size: int, algorithm: str | None = None) -> Network:
        """Return the cost model of ``world_size`` ranks with equal links; the default algorithm is the fit's."""
        link = self.link_of(world_size)
        if algorithm == BEST:
            return Best(tuple(Flat(link, world_size, each) for each in costs.ALGORITHMS))
        return Flat(link, world_size, algorithm or self.algorithm)

    def node_network(self, nodes: Nodes, algorithm: str, world_size: int) -> NodeNetwork:
        """Return the cost model of ``world_size`` ranks in nodes joined by this network; too few make one node.

        Raises:
            UserError: the ranks do not fill nodes, or a value of a link is missing.
        """
        local = min(nodes.ranks_per_node, world_size)
        if world_size % local:
            raise UserError(f"{world_size} workers do not fill nodes of {local}: give at most {local}, or a multiple")
        kind = Hierarchical if algorithm == HIERARCHICAL else FlatOnNodes
        return kind(
            intra=load_network(nodes.intra).link_of(local),
            inter=self.link_of(world_size),
            ranks_per_node=local,
            num_nodes=world_size // local,
            algorithm=self.algorithm,
        )


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


def known_networks() -> list[str]:
    """Return the names of conf/networks.yaml."""
    return sorted(read_yaml(NETWORKS))


def load_network(name_or_path: str | Path) -> NetworkPreset:
    """Return a network of conf/networks.yaml by name, or of a yaml file by its path (with a suffix).

    Raises:
        UserError: no such network, an unreadable file, a field that is missing, unknown or out of range.
    """
    path, name = Path(name_or_path), str(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        values = read_yaml(path)
    else:
        check_choice("network", known_networks(), name)
        path, values = NETWORKS, {"name": name, **read_yaml(NETWORKS)[name]}
    with as_user_error(before=f"{path}: "):
        preset: NetworkPreset = read_as(NetworkPreset, values)
    return preset


def load_measured(kind: type[File], path: Path) -> File:
    """Read a file of experiments.profile. Raises: UserError: it cannot be used."""
    with as_user_error(BadFile):
        return kind.load(path)
