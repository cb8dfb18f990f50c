"""Read the files of conf/, and list the choices of a group."""

from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from experiments.config import CONF
from experiments.config.errors import UserError, not_among, one_line

Values = dict[str, Any]


@cache
def read_yaml(path: Path) -> Values:
    """Return the content of a yaml file; the caller must not change it. Raises: UserError: it cannot be read."""
    try:
        found = OmegaConf.load(path)
        content = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    except UnicodeDecodeError:
        raise UserError(f"cannot read {path}: it is not text in UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
    except (ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping of settings")
    return {str(key): value for key, value in content.items()}


def choices_of(group: str) -> list[str]:
    """Return the choices of a group."""
    folder = CONF / group
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def retired(group: str) -> Values:
    """Return the retired choices of a group by name: successor ``use``, and label and order for published pages."""
    found: Values = read_yaml(CONF / "retired.yaml").get(group, {})
    return found


def no_choice(group: str, allowed: Iterable[str], given: str, what: str | None = None) -> str:
    """Return the error for an unknown name of a group, called ``what``; for a retired one it has the successor."""
    if given in (gone := retired(group)):
        return f"{group}={given} was removed: use {gone[given]['use']}"
    return not_among(what or group, allowed, given)


def check_name(group: str, known: Collection[str], given: str, what: str | None = None) -> None:
    """Raise UserError for an unknown name."""
    if given not in known:
        raise UserError(no_choice(group, known, given, what))
