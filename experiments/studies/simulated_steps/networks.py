"""Networks that papers and public code describe, scaled to any number of ranks."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from experiments.config.errors import UserError
from micro.parts import Rule
from micro.planning.collectives import Algorithm, Link
from micro.planning.costs import Flat, Network, scaled
from micro.planning.nodes import FlatOnNodes, Hierarchical

NodeAlgorithm = Literal["ring", "hierarchical"]
Fitted = Literal["all_reduce", "all_gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A collective of world_size ranks took alpha_s + beta_s * bytes seconds.

    Bytes are of the vector for an all-reduce, of what all ranks together contribute for an all-gather.
    """

    world_size: int
    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        _check_count("world_size", self.world_size, least=2)
        _check_number("alpha_s", self.alpha_s)
        _check_number("beta_s", self.beta_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkValues:
    """A link by itself; values may be missing until they are given.

    Attributes:
        alpha_s: seconds a message.
        beta_s: seconds a byte; None where it follows from rate_bps.
        gamma_s: seconds a byte to add.
        rate_bps: bits a second that travel, headers included.
        overhead: bytes that travel for a byte of payload; counts only with rate_bps.
    """

    alpha_s: float | None = None
    beta_s: float | None = None
    gamma_s: float = 0.0
    rate_bps: float | None = None
    overhead: float = 1.0

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s", "gamma_s", "rate_bps", "overhead"):
            value = getattr(self, name)
            if value is not None:
                _check_number(name, value)
            if value == 0 and name in ("rate_bps", "overhead"):
                raise ValueError(f"{name} must be above 0, got 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeValues:
    """The nodes that a network joins.

    Attributes:
        ranks_per_node: ranks of a node.
        intra: name in conf/network of the network within a node.
    """

    ranks_per_node: int
    intra: str

    def __post_init__(self) -> None:
        _check_count("ranks_per_node", self.ranks_per_node, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPreset:
    """A network as its file describes it: fits of a collective for some numbers of ranks, or a link.

    Attributes:
        name, interconnect: of the network.
        source: where the numbers stand, and how they were read.
        fitted, algorithm: the collective that the fits are of, and its assumed algorithm.
        fitted_on: sizes of the messages it was fitted on.
        fits: by number of ranks, rising.
        link: where there are no fits; what it leaves open is given in a copy of its file.
        nodes: where the network is one between nodes; None: its ranks reach each other alike.
    """

    name: str
    interconnect: str
    source: str
    fitted: Fitted = "all_reduce"
    algorithm: Algorithm = "ring"
    fitted_on: str = "not stated"
    fits: tuple[Fit, ...] = ()
    link: LinkValues = field(default_factory=LinkValues)
    nodes: NodeValues | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("fitted", get_args(Fitted)), ("algorithm", get_args(Algorithm))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got '{getattr(self, name)}'")
        sizes = [fit.world_size for fit in self.fits]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"world_size of fits must rise, got {', '.join(map(str, sizes))}")

    def network(self, world_size: int, algorithm: Algorithm | None = None, *, rule: Rule = "repaired") -> Network:
        """Return the costs of ``world_size`` ranks: exactly the fit where there is one for them, scaled from it else.

        Args:
            algorithm: of the all-reduce, that of the fit by default.
            rule: see micro.planning.costs.Flat.

        Raises:
            UserError: a value of the link is missing, no ranks, or no such algorithm.
        """
        link = self.link_of(world_size)
        try:
            return Flat(link, world_size, algorithm or self.algorithm, rule)
        except ValueError as error:
            raise UserError(f"network {self.name}: {error}") from None

    def link_of(self, world_size: int) -> Link:
        """Return the link between two of ``world_size`` ranks, from the fit for the most ranks that are not more.

        Raises:
            UserError: a value of the link is missing.
        """
        if not self.fits:
            return self._link_as_given()
        fit = max((fit for fit in self.fits if fit.world_size <= world_size), key=_ranks, default=self.fits[0])
        if self.fitted == "all_reduce":
            return scaled(fit.alpha_s, fit.beta_s, fit.world_size, self.algorithm)
        beta_s = fit.beta_s * fit.world_size  # a byte of one rank is world_size bytes of all
        return scaled(fit.alpha_s, beta_s, fit.world_size, self.algorithm, op="gather_rows")

    def _link_as_given(self) -> Link:
        link = self.link
        if link.alpha_s is None:
            raise UserError(f"network {self.name} has no alpha_s, seconds a message: copy its yaml and give alpha_s")
        if link.beta_s is not None:
            return Link(link.alpha_s, link.beta_s, link.gamma_s)
        if link.rate_bps is None:
            raise UserError(
                f"network {self.name} has no rate: copy its yaml and give rate_bps, bits a second, or beta_s"
            )
        return Link(link.alpha_s, 8 / link.rate_bps * link.overhead, link.gamma_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of several ranks; fewer ranks than that are one node.

    Attributes:
        intra: whose link joins the ranks of a node.
        ranks_per_node: at least 1.

    Raises:
        UserError: fewer than 1.
    """

    intra: NetworkPreset
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise UserError(f"ranks per node must be at least 1, got {self.ranks_per_node}")

    def network(
        self, inter: NetworkPreset, world_size: int, algorithm: NodeAlgorithm = "hierarchical"
    ) -> Hierarchical | FlatOnNodes:
        """Return the costs of ``world_size`` ranks in nodes that the link of ``inter`` joins, reducing as it does.

        That link is the one which a flat network of as many ranks would have.

        Args:
            algorithm: of collectives of all ranks: 'ring' knows nothing of nodes.

        Raises:
            UserError: a node would not be full, or a value of a link is missing.
        """
        local = self.filled(world_size)
        kind = Hierarchical if algorithm == "hierarchical" else FlatOnNodes
        return kind(
            intra=self.intra.link_of(local),
            inter=inter.link_of(world_size),
            ranks_per_node=local,
            num_nodes=world_size // local,
            algorithm=inter.algorithm,
        )

    def filled(self, world_size: int) -> int:
        """Return the ranks of each node.

        Raises:
            UserError: a node would not be full.
        """
        local = min(self.ranks_per_node, world_size)
        if world_size % local:
            raise UserError(f"{world_size} workers do not fill nodes of {local}: give at most {local}, or a multiple")
        return local


def _ranks(fit: Fit) -> int:
    return fit.world_size


def _check_count(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
