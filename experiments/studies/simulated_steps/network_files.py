"""Read and check the files of conf/network."""

from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from experiments.config.errors import UserError, one_line, suggestion
from experiments.config.paths import CONF
from experiments.studies.simulated_steps.networks import Fit, Fitted, LinkValues, NetworkPreset, Nodes, NodeValues
from micro.planning.collectives import Algorithm


def known_networks() -> list[str]:
    """Return the names of conf/network."""
    return sorted(path.stem for path in (CONF / "network").glob("*.yaml"))


def networks_of_nodes() -> list[str]:
    """Return the names of conf/network that join nodes."""
    return [name for name in known_networks() if load_network(name).nodes]


def nodes_of(
    preset: NetworkPreset, *, intra: str | Path | None, ranks_per_node: int | None, default: NodeValues | None = None
) -> Nodes:
    """Return the nodes that a network joins: as given, else as its file has them, else the default.

    Raises:
        UserError: nothing says what joins the ranks of a node, or a number out of its range.
    """
    known = preset.nodes or default
    if intra is None and known is None:
        raise UserError(one_link(preset.name))
    if ranks_per_node is None:
        if known is None:
            raise UserError(f"network {preset.name} has no nodes of its own: give --ranks-per-node with --intra")
        ranks_per_node = known.ranks_per_node
    inside = intra if intra is not None else known.intra  # type: ignore[union-attr]
    return Nodes(intra=load_network(inside), ranks_per_node=ranks_per_node)


def one_link(name: str) -> str:
    """Return what is wrong with a network that has no link within nodes."""
    return (
        f"network {name} has one link, and two levels need one within nodes too: give --intra and --ranks-per-node, or "
        f"--network {'|'.join(networks_of_nodes())}"
    )


def load_network(name_or_path: str | Path, **settings: float) -> NetworkPreset:
    """Return a network of conf/network by name, or of a yaml of the same form by its path (with a suffix).

    Args:
        settings: parts of the link that the file leaves open, or to replace: alpha_s, beta_s, gamma_s, rate_bps.

    Raises:
        UserError: no such network, a file that cannot be read, a field missing, unknown or out of its range.
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
    except (OmegaConfBaseException, YAMLError, RecursionError) as error:
        raise ValueError(f"is not yaml: {one_line(error)}") from None


def _preset(found: object) -> NetworkPreset:
    values = _checked(NetworkPreset, found, "")
    if "fitted" in values and values["fitted"] not in get_args(Fitted):
        raise ValueError(f"fitted must be one of {', '.join(get_args(Fitted))}, got '{values['fitted']}'")
    if "algorithm" in values and values["algorithm"] not in get_args(Algorithm):
        raise ValueError(f"algorithm must be one of {', '.join(get_args(Algorithm))}, got '{values['algorithm']}'")
    if "nodes" in values:
        values["nodes"] = _node_values(values["nodes"])
    if ("fits" in values) == ("link" in values):
        raise ValueError("give either fits or a link")
    if "link" in values:
        return NetworkPreset(**{**values, "link": _link_values(values["link"], "link: ")})
    rows = values["fits"]
    if not isinstance(rows, list) or not rows:
        raise ValueError("fits must be a list of world_size, alpha_s and beta_s")
    fits = tuple(_fit(row, f"fits[{place}]: ") for place, row in enumerate(rows))
    sizes = [fit.world_size for fit in fits]
    if sizes != sorted(set(sizes)):
        raise ValueError(f"world_size of fits must rise, got {', '.join(map(str, sizes))}")
    return NetworkPreset(**{**values, "fits": fits})


def _fit(row: object, where: str) -> Fit:
    values = _checked(Fit, row, where)
    size = values["world_size"]
    if not isinstance(size, int) or size < 2:
        raise ValueError(f"{where}world_size must be a whole number of at least 2, got {size!r}")
    return Fit(world_size=size, alpha_s=_number(values, "alpha_s", where), beta_s=_number(values, "beta_s", where))


def _link_values(row: object, where: str) -> LinkValues:
    values = _checked(LinkValues, row, where)
    for name in values:
        value = _number(values, name, where)
        if name in ("rate_bps", "overhead") and value == 0:
            raise ValueError(f"{where}{name} must be above 0, got 0")
    return LinkValues(**values)


def _node_values(row: object) -> NodeValues:
    values = _checked(NodeValues, row, "nodes: ")
    size = values["ranks_per_node"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"nodes: ranks_per_node must be a whole number of at least 1, got {size!r}")
    if values["intra"] not in known_networks():
        hint = suggestion(str(values["intra"]), known_networks())
        raise ValueError(f"nodes: intra must be a name of conf/network, got '{values['intra']}'{hint}")
    return NodeValues(**values)


def _with_settings(preset: NetworkPreset, settings: dict[str, float]) -> NetworkPreset:
    if preset.fits:
        raise ValueError(f"{next(iter(settings))} is for a network that is a link, but this one has fits: leave it out")
    given = _link_values(dict(settings), "")
    link = replace(preset.link, **{name: getattr(given, name) for name in settings})
    if "rate_bps" in settings and "beta_s" not in settings:
        link = replace(link, beta_s=None)  # the rate that was given, not what the file has
    return replace(preset, link=link)


def _checked(cls: type, found: object, where: str) -> dict[str, Any]:
    """Return ``found`` as values for a dataclass: a mapping with no key that is unknown, and none missing."""
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
