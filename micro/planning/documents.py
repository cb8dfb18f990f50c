"""Files of measurements: one JSON document each, whose every field is checked when it is read."""

import json
import math
import os
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self


class BadFile(ValueError):
    """A file of measurements or a plan that cannot be used; one line that names the file and what is wrong with it."""


class Document:
    """Data that is kept as one JSON document with a ``format`` that names its kind and version."""

    format: ClassVar[str]

    def save(self, path: Path) -> None:
        """Write the file; a reader, or an interruption, sees the old one or the whole new one."""
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            draft.write_text(json.dumps({"format": self.format, **asdict(self)}, indent=1) + "\n")  # type: ignore[call-overload]
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that ``save`` wrote, or that was written by hand.

        Raises:
            BadFile: it cannot be read, is of another kind, or a field is missing, foreign or out of its range.
        """
        try:
            found = json.loads(path.read_text())
        except OSError as error:
            raise BadFile(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise BadFile(f"{path} is not JSON: {error}") from None
        try:
            return cls.parse(found)
        except ValueError as error:
            raise BadFile(f"{path}: {error}") from None

    @classmethod
    def parse(cls, found: object) -> Self:
        """Return what a JSON document describes.

        Raises:
            ValueError: it is of another kind, or a field is missing, foreign or out of its range.
        """
        if not isinstance(found, dict) or found.get("format") != cls.format:
            given = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"format must be '{cls.format}', got '{given}'")
        return cls._from(checked_fields(cls, {key: value for key, value in found.items() if key != "format"}))

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


def checked_fields(cls: type, found: object, where: str = "") -> dict[str, Any]:
    """Return ``found`` if it is a mapping of the fields of ``cls``, with all that have no default; else ValueError."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}must be a mapping, got {type(found).__name__}")
    known = {item.name: item for item in fields(cls)}
    foreign = [key for key in found if key not in known]
    if foreign:
        raise ValueError(f"{where}'{foreign[0]}' is not a field, which are {', '.join(known)}")
    needed = [name for name, item in known.items() if _is_needed(item)]
    missing = [name for name in needed if name not in found]
    if missing:
        raise ValueError(f"{where}'{missing[0]}' is missing")
    return found


def _is_needed(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def mapping(name: str, values: dict[str, Any]) -> dict[Any, Any]:
    """Return ``values[name]``, which must be a mapping; else ValueError."""
    if not isinstance(values[name], dict):
        raise ValueError(f"{name} must be a mapping, got {type(values[name]).__name__}")
    found: dict[Any, Any] = values[name]
    return found


def check_number(name: str, value: object, *, lowest: float) -> None:
    """Raise ValueError unless ``value`` is a finite number of at least ``lowest``."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= lowest
    if not good:
        raise ValueError(f"{name} must be a number of at least {lowest:g}, got {value!r}")


def check_whole(name: str, value: object, *, lowest: int) -> None:
    """Raise ValueError unless ``value`` is an integer of at least ``lowest``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
