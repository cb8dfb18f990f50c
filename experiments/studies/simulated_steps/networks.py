"""The networks of conf/network, which papers and public code describe, scaled to any number of ranks."""

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from experiments.config.errors import UserError, one_line, suggestion
from experiments.config.paths import CONF
from micro.parts import Rule
from micro.planning.collectives import Algorithm, Link
from micro.planning.costs import Flat, Network, scaled
from micro.planning.nodes import FlatOnNodes, Hierarchical

FOLDER = CONF / "network"
NodeAlgorithm = Literal["ring", "hierarchical"]
FITTED = ("all_reduce", "all_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A collective of world_size ranks took alpha_s + beta_s * bytes seconds.

    Bytes are of the vector for an all-reduce, of what all ranks together contribute for an all-gather.
    """

    world_size: int
    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        _check_least("world_size", self.world_size, 2)
        _check_least("alpha_s", self.alpha_s, 0)
        _check_least("beta_s", self.beta_s, 0)


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
        for name in ("alpha_s", "beta_s", "gamma_s"):
            _check_least(name, getattr(self, name), 0)
        for name in ("rate_bps", "overhead"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be above 0, got 0")
            _check_least(name, getattr(self, name), 0)


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
        _check_least("ranks_per_node", self.ranks_per_node, 1)
        if self.intra not in known_networks():
            hint = suggestion(self.intra, known_networks())
            raise ValueError(f"intra must be a name of conf/network, got '{self.intra}'{hint}")


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
    fitted: str = "all_reduce"
    algorithm: str = "ring"
    fitted_on: str = "not stated"
    fits: tuple[Fit, ...] = ()
    link: LinkValues | None = None
    nodes: NodeValues | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("fitted", FITTED), ("algorithm", get_args(Algorithm))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got '{getattr(self, name)}'")
        if bool(self.fits) == (self.link is not None):
            raise ValueError("give either fits or a link")
        sizes = [fit.world_size for fit in self.fits]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"world_size of fits must rise, got {', '.join(map(str, sizes))}")

    def network(self, world_size: int, algorithm: str | None = None, *, rule: Rule = "repaired") -> Network:
        """Return the costs of ``world_size`` ranks: exactly the fit where there is one for them, scaled from it else.

        Args:
            algorithm: of the all-reduce, that of the fit by default.
            rule: see micro.planning.costs.Flat.

        Raises:
            UserError: a value of the link is missing, no ranks, or no such algorithm.
        """
        link = self.link_of(world_size)
        try:
            return Flat(link, world_size, algorithm or self.algorithm, rule)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"network {self.name}: {error}") from None

    def link_of(self, world_size: int) -> Link:
        """Return the link between two of ``world_size`` ranks, from the fit for the most ranks that are not more.

        Raises:
            UserError: a value of the link is missing.
        """
        if self.link is not None:
            return self._link_as_given(self.link)
        fit = max((fit for fit in self.fits if fit.world_size <= world_size), key=_ranks, default=self.fits[0])
        if self.fitted == "all_reduce":
            return scaled(fit.alpha_s, fit.beta_s, fit.world_size, self.algorithm)  # type: ignore[arg-type]
        beta_s = fit.beta_s * fit.world_size  # a byte of one rank is world_size bytes of all
        return scaled(fit.alpha_s, beta_s, fit.world_size, self.algorithm, op="gather_rows")  # type: ignore[arg-type]

    def _link_as_given(self, link: LinkValues) -> Link:
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
    """

    intra: NetworkPreset
    ranks_per_node: int

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
        local = min(self.ranks_per_node, world_size)
        if world_size % local:
            raise UserError(f"{world_size} workers do not fill nodes of {local}: give at most {local}, or a multiple")
        kind = Hierarchical if algorithm == "hierarchical" else FlatOnNodes
        return kind(
            intra=self.intra.link_of(local),
            inter=inter.link_of(world_size),
            ranks_per_node=local,
            num_nodes=world_size // local,
            algorithm=inter.algorithm,  # type: ignore[arg-type]
        )


def known_networks() -> list[str]:
    """Return the names of conf/network."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_network(name_or_path: str | Path) -> NetworkPreset:
    """Return a network of conf/network by name, or of a yaml of the same form by its path (with a suffix).

    Raises:
        UserError: no such network, a file that cannot be read, a field missing, unknown or out of its range.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in (known := known_networks()):
            hint = suggestion(str(name_or_path), known)
            raise UserError(f"network must be among {', '.join(known)} or a yaml file, got '{name_or_path}'{hint}")
        path = FOLDER / f"{name_or_path}.yaml"
    try:
        return _preset(OmegaConf.to_container(OmegaConf.load(path), resolve=True))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, OmegaConfBaseException, YAMLError, RecursionError) as error:
        raise UserError(f"{path}: {one_line(error)}") from None


def _preset(found: Any) -> NetworkPreset:
    values = _fields(NetworkPreset, found)
    fits = values.get("fits", [])
    if not isinstance(fits, list):
        raise ValueError(f"fits must be a list, got {fits!r}")
    values["fits"] = tuple(_part(Fit, fit, f"fits[{place}]") for place, fit in enumerate(fits))
    for name, kind in (("link", LinkValues), ("nodes", NodeValues)):
        values[name] = _part(kind, values[name], name) if name in values else None
    return NetworkPreset(**values)


def _part(kind: type[Any], found: Any, where: str) -> Any:
    """Return a part of a file as its dataclass. Raises: ValueError: it is none; the line begins with ``where``."""
    try:
        return kind(**_fields(kind, found))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _fields(kind: type[Any], found: Any) -> dict[str, Any]:
    """Return a mapping whose keys are fields of a dataclass, none that must be given left out."""
    if not isinstance(found, dict):
        raise ValueError(f"must be a mapping, got {type(found).__name__}")
    known = [slot.name for slot in fields(kind)]
    for key in found:
        if key not in known:
            raise ValueError(f"'{key}' is not a field, which are {', '.join(known)}{suggestion(str(key), known)}")
    for slot in fields(kind):
        if slot.default is MISSING and slot.default_factory is MISSING and slot.name not in found:
            raise ValueError(f"'{slot.name}' is missing")
    return {str(key): value for key, value in found.items()}


def _ranks(fit: Fit) -> int:
    return fit.world_size


def _check_least(name: str, value: object, least: int) -> None:
    """Raise ValueError where a number that is given is none, or below ``least``; a count is whole."""
    kind = (int,) if least else (int, float)
    if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or not least <= value < 1e300):
        raise ValueError(f"{name} must be a {'whole ' if least else ''}number of at least {least}, got {value!r}")
