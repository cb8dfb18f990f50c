"""Read and check the files of conf/network."""

from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from experiments.config.errors import UserError, one_line, suggestion
from experiments.config.paths import CONF
from experiments.studies.simulated_steps.networks import Fit, LinkValues, NetworkPreset, Nodes, NodeValues

Kind = TypeVar("Kind", Fit, LinkValues, NodeValues, NetworkPreset)


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


def load_network(name_or_path: str | Path) -> NetworkPreset:
    """Return a network of conf/network by name, or of a yaml of the same form by its path (with a suffix).

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
        return _preset(_read(path))
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
    values = _fields(NetworkPreset, found)
    if ("fits" in values) == ("link" in values):
        raise ValueError("give either fits or a link")
    if "link" in values:
        values["link"] = _part(LinkValues, values["link"], "link")
    if "nodes" in values:
        values["nodes"] = _part(NodeValues, values["nodes"], "nodes")
        if values["nodes"].intra not in known_networks():
            hint = suggestion(str(values["nodes"].intra), known_networks())
            raise ValueError(f"nodes: intra must be a name of conf/network, got '{values['nodes'].intra}'{hint}")
    if "fits" in values:
        rows = values["fits"]
        if not isinstance(rows, list) or not rows:
            raise ValueError("fits must be a list of world_size, alpha_s and beta_s")
        values["fits"] = tuple(_part(Fit, row, f"fits[{place}]") for place, row in enumerate(rows))
    return NetworkPreset(**values)


def _part(kind: type[Kind], found: object, where: str) -> Kind:
    """Return a part of a file as its dataclass. Raises: ValueError: it is none; the line begins with ``where``."""
    try:
        return kind(**_fields(kind, found))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _fields(kind: type[Kind], found: object) -> dict[str, Any]:
    """Return values for a dataclass: a mapping with no key that is unknown, and none missing."""
    if not isinstance(found, dict):
        raise ValueError(f"must be a mapping, got {type(found).__name__}")
    slots = kind.__dataclass_fields__
    for key in found:
        if key not in slots:
            hint = suggestion(str(key), list(slots))
            raise ValueError(f"'{key}' is not a field, which are {', '.join(slots)}{hint}")
    for name, slot in slots.items():
        if slot.default is MISSING and slot.default_factory is MISSING and name not in found:
            raise ValueError(f"'{name}' is missing")
    return {str(key): value for key, value in found.items()}
