"""Parts that other packages and the zoo bring: found by their entry points, loaded when they are asked for."""

from collections.abc import Container, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from micro import zoo


@cache
def installed_parts(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group, such as ``micro.selectors``, by name, the zoo's too; nothing is loaded.

    Raises:
        ValueError: two packages use one name.
    """
    places = zoo.PARTS.get(group, {})
    found = {name: EntryPoint(name, f"{zoo.__name__}.{place}", group) for name, place in places.items()}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            packages = f"{_package(other)} and {_package(entry)}"
            raise ValueError(f"packages {packages} both bring '{entry.name}' of {group}: uninstall one of them")
    return found


def load_part(base: type[Any], entry: EntryPoint) -> type[Any]:
    """Return the class that an entry point names.

    Args:
        base: the kind of part that it must be.

    Raises:
        ValueError: it does not load, or is not such a part.
    """
    where = f"{base.kind} '{entry.name}' of package {_package(entry)}"
    try:
        part = entry.load()
    except Exception as error:  # whatever importing another package's code may raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{where} does not load ({reason}): repair or uninstall the package") from error
    if not (isinstance(part, type) and issubclass(part, base) and is_dataclass(part)):
        raise ValueError(f"{where} must be a dataclass derived from {base.__name__}, got {entry.value}")
    if vars(part).get("name") != entry.name:
        raise ValueError(f"{where} must have its entry point's name, got '{vars(part).get('name')}': use one name")
    return part


def check_no_collision(base: type[Any], entry: EntryPoint, built_in: Container[str]) -> None:
    """Raise ValueError where a package's part has the name of one of micro's own."""
    if entry.name in built_in:
        raise ValueError(
            f"{base.kind} '{entry.name}' of package {_package(entry)} has the name of a {base.kind} of micro: "
            "rename it there, or uninstall the package"
        )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else zoo.__name__
