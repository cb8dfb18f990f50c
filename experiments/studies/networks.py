"""The networks of conf/network: what papers and public code say of clusters, scaled to any number of ranks."""

from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from experiments.config.errors import UserError, suggestion
from experiments.config.repository import CONF
from micro.parts import Rule
from micro.planning.costs import Algorithm, Flat, Hierarchical, Link, Network, scaled

Fitted = Literal["all_reduce", "all_gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A collective of world_size ranks took alpha_s + beta_s * bytes seconds.

    Bytes are of the vector for an all-reduce, of what all ranks together contribute for an all-gather.
    """

    world_size: int
    alpha_s: float
    beta_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A link by itself, in part perhaps still to be said.

    Attributes:
        alpha_s: seconds a message.
        beta_s: seconds a byte, or None where rate_bps says so.
        gamma_s: seconds a byte to add.
        rate_bps: bits a second on the wire, headers included.
        overhead: bytes on the wire for a byte of payload; counts only with rate_bps.
    """

    alpha_s: float | None = None
    beta_s: float | None = None
    gamma_s: float = 0.0
    rate_bps: float | None = None
    overhead: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What is known of a network: fits of a collective for some numbers of ranks, or a link.

    Attributes:
        name, interconnect: of the network.
        source: where the numbers stand, and how they were read.
        fitted, algorithm: which collective the fits are of, and how it is taken to have gone.
        fitted_on: sizes of the messages it was fitted on.
        fits: by number of ranks, rising.
        link: where there are no fits.
    """

    name: str
    interconnect: str
    source: str
    fitted: Fitted = "all_reduce"
    algorithm: Algorithm = "ring"
    fitted_on: str = "not stated"
    fits: tuple[Fit, ...] = ()
    link: Wire = field(default_factory=Wire)

    def network(self, world_size: int, algorithm: Algorithm | None = None, *, rule: Rule = "repaired") -> Network:
        """Return the costs of ``world_size`` ranks: exactly the fit where there is one for them, scaled from it else.

        Args:
            algorithm: of the all-reduce, that of the fit by default.
            rule: see micro.planning.costs.Flat.

        Raises:
            UserError: a part of the link is not said, no ranks, or no such algorithm.
        """
        link = self.link_of(world_size)
        try:
            return Flat(link, world_size, algorithm or self.algorithm, rule)
        except ValueError as error:
            raise UserError(f"network {self.name}: {error}") from None

    def link_of(self, world_size: int) -> Link:
        """Return the link between two of ``world_size`` ranks, from the fit for the most ranks that are not more.

        Raises:
            UserError: a part of the link is not said.
        """
        if not self.fits:
            return self._said_link()
        fit = max((fit for fit in self.fits if fit.world_size <= world_size), key=_ranks, default=self.fits[0])
        if self.fitted == "all_reduce":
            return scaled(fit.alpha_s, fit.beta_s, fit.world_size, self.algorithm)
        beta_s = fit.beta_s * fit.world_size  # a byte of one rank is world_size bytes of all
        return scaled(fit.alpha_s, beta_s, fit.world_size, self.algorithm, op="gather_rows")

    def _said_link(self) -> Link:
        link = self.link
        if link.alpha_s is None:
            raise UserError(f"network {self.name} has no alpha_s, seconds of start-up a message: give alpha_s")
        if link.beta_s is not None:
            return Link(link.alpha_s, link.beta_s, link.gamma_s)
        if link.rate_bps is None:
            raise UserError(f"network {self.name} has no rate: give rate_bps, bits a second, or beta_s, seconds a byte")
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

    intra: Preset
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise UserError(f"ranks per node must be at least 1, got {self.ranks_per_node}")

    def network(self, inter: Preset, world_size: int) -> Network:
        """Return the costs of ``world_size`` ranks in nodes that the link of ``inter`` joins, reducing as it does.

        That link is the one which a flat network of as many ranks would have.

        Raises:
            UserError: a node would not be full, or a part of a link is not said.
        """
        local = min(self.ranks_per_node, world_size)
        if world_size % local:
            raise UserError(f"{world_size} workers do not fill nodes of {local}: give at most {local}, or a multiple")
        return Hierarchical(
            intra=self.intra.link_of(local),
            inter=inter.link_of(world_size),
            ranks_per_node=local,
            num_nodes=world_size // local,
            algorithm=inter.algorithm,
        )


def known_networks() -> list[str]:
    """Return the names of conf/network."""
    return sorted(path.stem for path in (CONF / "network").glob("*.yaml"))


def load_network(name_or_path: str | Path, **settings: float) -> Preset:
    """Return a network of conf/network by name, or of a yaml of the same form by its path (with a suffix).

    Args:
        settings: parts of the link that the file leaves open, or to replace: alpha_s, beta_s, gamma_s, rate_bps.

    Raises:
        UserError: no such network, a file that cannot be read, a field missing, foreign or out of its range.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in known_networks():
            known = known_networks()
            hint = suggestion(str(name_or_path), known)
            raise UserError(f"network must be among {', '.join(known)} or a yaml file, got '{name_or_path}'{hint}")
        path = CONF / "network" / f"{name_or_path}.yaml"
    try:
        preset = _preset(_read(path))
        return _with_settings(preset, settings) if settings else preset
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _read(path: Path) -> object:
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"is not yaml: {' '.join(str(error).split())}") from None


def _preset(found: object) -> Preset:
    values = _checked(Preset, found, "")
    if "fitted" in values and values["fitted"] not in get_args(Fitted):
        raise ValueError(f"fitted must be one of {', '.join(get_args(Fitted))}, got '{values['fitted']}'")
    if "algorithm" in values and values["algorithm"] not in get_args(Algorithm):
        raise ValueError(f"algorithm must be one of {', '.join(get_args(Algorithm))}, got '{values['algorithm']}'")
    if ("fits" in values) == ("link" in values):
        raise ValueError("give either fits or a link")
    if "link" in values:
        return Preset(**{**values, "link": _wire(values["link"], "link: ")})
    rows = values["fits"]
    if not isinstance(rows, list) or not rows:
        raise ValueError("fits must be a list of world_size, alpha_s and beta_s")
    fits = tuple(_fit(row, f"fits[{place}]: ") for place, row in enumerate(rows))
    sizes = [fit.world_size for fit in fits]
    if sizes != sorted(set(sizes)):
        raise ValueError(f"world_size of fits must rise, got {', '.join(map(str, sizes))}")
    return Preset(**{**values, "fits": fits})


def _fit(row: object, where: str) -> Fit:
    values = _checked(Fit, row, where)
    size = values["world_size"]
    if not isinstance(size, int) or size < 2:
        raise ValueError(f"{where}world_size must be a whole number of at least 2, got {size!r}")
    return Fit(world_size=size, alpha_s=_number(values, "alpha_s", where), beta_s=_number(values, "beta_s", where))


def _wire(row: object, where: str) -> Wire:
    values = _checked(Wire, row, where)
    for name in values:
        value = _number(values, name, where)
        if name in ("rate_bps", "overhead") and value == 0:
            raise ValueError(f"{where}{name} must be above 0, got 0")
    return Wire(**values)


def _with_settings(preset: Preset, settings: dict[str, float]) -> Preset:
    if preset.fits:
        raise ValueError(f"{next(iter(settings))} is for a network that is a link, but this one has fits: leave it out")
    said = _wire(dict(settings), "")
    link = replace(preset.link, **{name: getattr(said, name) for name in settings})
    if "rate_bps" in settings and "beta_s" not in settings:
        link = replace(link, beta_s=None)  # the rate that was asked for, not what the file has
    return replace(preset, link=link)


def _checked(cls: type, found: object, where: str) -> dict[str, Any]:
    """Return ``found`` as values for a dataclass: a mapping with no key that is foreign, and none missing."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}must be a mapping, got {type(found).__name__}")
    slots = cls.__dataclass_fields__  # type: ignore[attr-defined]
    for key in found:
        if key not in slots:
            hint = suggestion(str(key), list(slots))
            raise ValueError(f"{where}'{key}' is not a field, which are {', '.join(slots)}{hint}")
    for name, slot in slots.items():
        if slot.default is MISSING and slot.default_factory is MISSING and name not in found:
            raise ValueError(f"{where}'{name}' is missing")
    return {str(key): value for key, value in found.items()}


def _number(values: dict[str, Any], name: str, where: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{where}{name} must be a number of at least 0, got {value!r}")
    return float(value)


def _ranks(fit: Fit) -> int:
    return fit.world_size
