"""The networks of conf/networks.yaml: fits or a link from a source, scaled to any number of ranks."""

from dataclasses import dataclass
from pathlib import Path

from experiments.config import CONF
from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError, as_user_error, check_choice
from experiments.planning import costs
from experiments.planning.costs import Best, Flat, Link, Network, scaled
from experiments.planning.documents import read_as
from experiments.planning.nodes import FlatOnNodes, Hierarchical, NodeNetwork

FITTED = ("all_reduce", "all_gather")
HIERARCHICAL, BEST = "hierarchical", "best"
NETWORKS = CONF / "networks.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A collective's fit, alpha_s + beta_s x bytes: of an all-reduce's vector, or all ranks' rows in an all-gather."""

    world_size: int
    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise ValueError(f"world_size must be at least 2, got {self.world_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkValues:
    """A link; values that are None must be filled in, in a copy of the file.

    ``alpha_s``, ``beta_s`` and ``gamma_s`` are seconds a message, a byte, and a byte to add. Without beta_s it follows
    from ``rate_bps``, the bits a second that travel, and ``overhead``, the bytes that travel for one of payload.
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
    """The nodes that a network joins: their ranks, and the name in conf/networks.yaml of the network within a node."""

    ranks_per_node: int
    intra: str

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {self.ranks_per_node}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPreset:
    """A network as its file describes it: fits of a collective for rising numbers of ranks, or a link.

    Attributes:
        source: where the numbers stand, and how they were read.
        fitted, algorithm, fitted_on: the collective that was fitted, its assumed algorithm, and sizes of messages.
        nodes: that the network joins; None: its ranks reach each other alike.
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
        """Return the link between two of ``world_size`` ranks, from the fit for the largest number of ranks up to that.

        Raises:
            UserError: a value of the link is missing.
        """
        if self.link is None:
            fit = [self.fits[0], *(fit for fit in self.fits if fit.world_size <= world_size)][-1]
            if self.fitted == "all_reduce":
                return scaled(fit.alpha_s, fit.beta_s, fit.world_size, self.algorithm)
            beta_s = fit.beta_s * fit.world_size  # 1 byte per rank is world_size bytes in all
            return scaled(fit.alpha_s, beta_s, fit.world_size, self.algorithm, op="gather_rows")
        link, missing = self.link, f"network {self.name} has no {{}}: put its entry and its name into a yaml, with {{}}"
        if link.alpha_s is None:
            raise UserError(missing.format("alpha_s, seconds a message", "alpha_s"))
        if link.beta_s is None and link.rate_bps is None:
            raise UserError(missing.format("rate", "rate_bps, bits a second, or beta_s"))
        beta_s = link.beta_s if link.beta_s is not None else 8 / (link.rate_bps or 1) * link.overhead
        return Link(link.alpha_s, beta_s, link.gamma_s)

    def network(self, world_size: int, algorithm: str | None = None) -> Network:
        """Return the costs of ``world_size`` ranks with equal links; by default with the fit's algorithm."""
        link = self.link_of(world_size)
        if algorithm == BEST:
            return Best(tuple(Flat(link, world_size, each) for each in costs.ALGORITHMS))
        return Flat(link, world_size, algorithm or self.algorithm)

    def node_network(self, nodes: Nodes, algorithm: str, world_size: int) -> NodeNetwork:
        """Return the costs of ``world_size`` ranks in nodes that this network joins; fewer than a node's are one node.

        Raises:
            UserError: a node would not be full, or a value of a link is missing.
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


def known_networks() -> list[str]:
    """Return the names of conf/networks.yaml."""
    return sorted(read_yaml(NETWORKS))


def load_network(name_or_path: str | Path) -> NetworkPreset:
    """Return a network of conf/networks.yaml by name, or that of a yaml by its path (with a suffix).

    Raises:
        UserError: no such network, a file that cannot be read, a field missing, unknown or out of its range.
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
