"""Read and write files of measurements and plans: one JSON document per dataclass, with typed fields."""

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

MOST = 1e100  # measured numbers are smaller


class BadFile(ValueError):
    """An unusable file of measurements or a plan; the message names the file and the problem."""


class Document:
    """A dataclass stored as one JSON document, with a ``format`` for its kind and version."""

    format: ClassVar[str]

    def save(self, path: Path) -> None:
        """Write the file atomically, creating its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            draft.write_text(json.dumps({"format": self.format, **asdict(self)}, indent=1) + "\n")  # type: ignore[call-overload]
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file written by ``save``, or by hand.

        Raises:
            BadFile: it cannot be read, has another format, or a field is missing, unknown or out of range.
        """
        try:
            found = json.loads(path.read_text())
            kind = found.pop("format", None) if isinstance(found, dict) else type(found).__name__
            if kind != cls.format:
                raise ValueError(f"format must be '{cls.format}', got '{kind}'")
            document: Self = read_as(cls, found)
        except OSError as error:
            raise BadFile(f"cannot read {path}: {error.strerror}") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFile(f"{path} is not JSON: {error}") from None
        except ValueError as error:
            raise BadFile(f"{path}: {error}") from None
        return document


def read_as(kind: Any, found: object, where: str = "") -> Any:
    """Return a value of a JSON or yaml document as ``kind``: a dataclass, a tuple, a mapping, a number or a text.

    Every number must be finite and at least 0. A dataclass may check more on construction.

    Args:
        where: path in the document, for the error.

    Raises:
        ValueError: the value has another type or is out of range; the message names the path.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:  # a type, or None
        return None if found is None else read_as(inner[0], found, where)
    if is_dataclass(kind):
        return _dataclass(kind, _of_type(dict, "a mapping", found, where or "the document"), where)  # type: ignore[arg-type]
    if origin is tuple:
        rows = _of_type(list, "a list", found, where)
        return tuple(read_as(inner[0], row, f"{where}[{place}]") for place, row in enumerate(rows))
    if origin is Mapping:
        items = _of_type(dict, "a mapping", found, where).items()
        return {name: read_as(inner[1], value, f"{where}.{name}") for name, value in items}
    if kind is str:
        return _of_type(str, "a text", found, where)
    of_kind = isinstance(found, int if kind is int else (int, float)) and not isinstance(found, bool)
    if not (of_kind and 0 <= found < MOST):  # type: ignore[operator]
        raise ValueError(f"{where} must be a {'whole ' if kind is int else ''}number of at least 0, got {found!r}")
    return found


def _dataclass(kind: type, values: dict[str, Any], where: str) -> Any:
    before, known, types = where and f"{where}: ", {each.name: each for each in fields(kind)}, get_type_hints(kind)
    for name in values:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"{before}'{name}' is not a field, which are {', '.join(known)}{hint}")
    for name, field in known.items():
        if name not in values and field.init and field.default is MISSING:
            raise ValueError(f"{before}'{name}' is missing")
    inside = where and f"{where}."
    read = {n: read_as(types[n], value, f"{inside}{n}") for n, value in values.items() if known[n].init}
    try:
        return kind(**read)
    except ValueError as error:
        raise ValueError(f"{before}{error}") from None


def _of_type(kind: type, name: str, found: object, where: str) -> Any:
    if not isinstance(found, kind):
        raise ValueError(f"{where} must be {name}, got {type(found).__name__} {found!r:.80}")
    return found
