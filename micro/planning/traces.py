"""What was measured of a model, of a network and of the methods: the three files that planner and simulator read."""

import bisect
import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from micro.operations import OPS, Op


class BadFile(ValueError):
    """A file of measurements or a plan that cannot be used; one line that names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter of a model, in the order of backward.

    Attributes:
        name: of the parameter.
        num_bytes: of its gradient.
        ready_s: when its gradient is complete, in seconds from the start of backward.
        used_s: when forward first needs it, in seconds from the start of forward; None where that was not measured.
    """

    name: str
    num_bytes: int
    ready_s: float
    used_s: float | None = None


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
        except ValueError as error:
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
        return cls._from(_checked_fields(cls, {key: value for key, value in found.items() if key != "format"}))

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Document):
    """The times of one training step of a model without communication.

    Attributes:
        model: its name, for titles.
        layers: its parameters in the order in which their gradients become ready.
        forward_s, backward_s, update_s: lengths of the step's parts; backward_s is at least the last ready_s.
        element_bytes: of one number of a gradient.
        batch_size: per worker; 0 where it is not known.
        world_size: of workers that computed side by side when it was measured.
        device: what it was measured on.
        num_steps: over which medians were taken.

    Raises:
        ValueError: no layers, names that repeat, sizes or times that are negative or out of order.
    """

    format: ClassVar[str] = "micro-trace-1"
    model: str
    layers: tuple[Layer, ...]
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    element_bytes: int = 4
    batch_size: int = 0
    world_size: int = 1
    device: str = "unknown"
    num_steps: int = 1

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty: a trace needs at least one parameter")
        for name in ("forward_s", "backward_s", "update_s"):
            _number(name, getattr(self, name), lowest=0.0)
        for name, lowest in (("element_bytes", 1), ("batch_size", 0), ("world_size", 1), ("num_steps", 1)):
            _whole(name, getattr(self, name), lowest=lowest)
        seen: set[str] = set()
        before = 0.0
        for place, layer in enumerate(self.layers):
            at = f"layers[{place}] ('{layer.name}')"
            if not isinstance(layer.name, str) or not layer.name or layer.name in seen:
                raise ValueError(f"{at}: name must be a text that no other layer has")
            seen.add(layer.name)
            _whole(f"{at}: num_bytes", layer.num_bytes, lowest=1)
            if layer.num_bytes % self.element_bytes:
                raise ValueError(f"{at}: num_bytes must be a multiple of {self.element_bytes}, got {layer.num_bytes}")
            _number(f"{at}: ready_s", layer.ready_s, lowest=0.0)
            if layer.ready_s < before:
                raise ValueError(f"{at}: ready_s must not fall from layer to layer, got {layer.ready_s} after {before}")
            before = layer.ready_s
            if layer.used_s is not None:
                _number(f"{at}: used_s", layer.used_s, lowest=0.0)
        if self.backward_s < before:
            raise ValueError(f"backward_s must be at least the last ready_s {before}, got {self.backward_s}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def numel(self) -> int:
        """Number of elements of all gradients."""
        return self.num_bytes // self.element_bytes

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.update_s

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Self:
        rows = values.pop("layers")
        if not isinstance(rows, list):
            raise ValueError(f"layers must be a list, got {type(rows).__name__}")
        layers = [Layer(**_checked_fields(Layer, row, f"layers[{place}]: ")) for place, row in enumerate(rows)]
        return cls(layers=tuple(layers), **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds over a size, measured: ``sizes`` rise, between two of them the curve is a straight line.

    Attributes:
        alpha_s, beta_s: the line alpha + beta * size that fits best in relative terms.
        error: the largest relative distance of a point from that line.

    Raises:
        ValueError: fewer than two points, sizes that do not rise, or anything negative.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    alpha_s: float = field(default=math.nan)
    beta_s: float = field(default=math.nan)
    error: float = field(default=math.nan)

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.seconds) or len(self.sizes) < 2:
            raise ValueError(
                f"sizes and seconds must be two or more each, got {len(self.sizes)} and {len(self.seconds)}"
            )
        for place, (size, seconds) in enumerate(zip(self.sizes, self.seconds, strict=True)):
            _number(f"sizes[{place}]", size, lowest=0.0)
            _number(f"seconds[{place}]", seconds, lowest=0.0)
            if place and size <= self.sizes[place - 1]:
                raise ValueError(f"sizes must rise, got {size} after {self.sizes[place - 1]}")
        if math.isnan(self.alpha_s):
            self._fit()

    def at(self, size: float) -> float:
        """Return the seconds for a size: by the line between neighbours, beyond the ends by that of the last two."""
        place = min(max(bisect.bisect_right(self.sizes, size), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))

    def _fit(self) -> None:
        """Fit by least squares of relative errors, with an intercept that is not negative."""
        points = [(x, y) for x, y in zip(self.sizes, self.seconds, strict=True) if y > 0]
        weights = [1 / y**2 for _, y in points]
        sw = sum(weights)
        swx = sum(w * x for w, (x, _) in zip(weights, points, strict=True))
        swy = sum(w * y for w, (_, y) in zip(weights, points, strict=True))
        swxx = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
        swxy = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
        spread = sw * swxx - swx**2
        beta = max(0.0, (sw * swxy - swx * swy) / spread) if spread > 0 else 0.0
        alpha = (swy - beta * swx) / sw if sw else 0.0
        if alpha < 0:
            alpha, beta = 0.0, swxy / swxx
        errors = [abs(alpha + beta * x - y) / y for x, y in points]
        object.__setattr__(self, "alpha_s", alpha)
        object.__setattr__(self, "beta_s", beta)
        object.__setattr__(self, "error", max(errors, default=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable(Document):
    """How long the collectives of one group of ranks take.

    Attributes:
        world_size, backend, link: of the group that was measured; link is a name for titles.
        collectives: a curve per operation of micro.Comm. Sizes are bytes: of the vector for all_reduce and broadcast,
            of what one rank contributes for gather_rows and gather_lists, of what one rank sends to all others
            together for scatter.

    Raises:
        ValueError: an operation that does not exist, or none at all.
    """

    format: ClassVar[str] = "micro-link-1"
    world_size: int
    backend: str = "unknown"
    link: str = "unknown"
    collectives: Mapping[Op, Curve]

    def __post_init__(self) -> None:
        _whole("world_size", self.world_size, lowest=1)
        for op in self.collectives:
            if op not in OPS:
                raise ValueError(f"collectives must be of {', '.join(OPS)}, got '{op}'")
        if "all_reduce" not in self.collectives:
            raise ValueError("collectives has no all_reduce, which every plan needs")

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective.

        Raises:
            ValueError: the operation was not measured.
        """
        if op not in self.collectives:
            raise ValueError(f"the link table holds {', '.join(self.collectives)}, not {op}: measure the link again")
        return self.collectives[op].at(num_bytes)

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Self:
        curves = {op: _curve(f"collectives.{op}", row) for op, row in _mapping("collectives", values).items()}
        return cls(**{**values, "collectives": curves})


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectTable(Document):
    """What a reduction costs beside its collectives: seconds over the number of elements, for each method.

    Attributes:
        world_size: of the group that was measured.
        density: the target density.
        device: what it was measured on.
        methods: a curve for each name of conf/sparsifier; sizes are numbers of elements.
    """

    format: ClassVar[str] = "micro-select-1"
    world_size: int
    density: float
    device: str = "unknown"
    methods: Mapping[str, Curve]

    def __post_init__(self) -> None:
        _whole("world_size", self.world_size, lowest=1)
        if not (isinstance(self.density, int | float) and 0 < self.density <= 1):
            raise ValueError(f"density must be in (0, 1], got {self.density}")
        if not self.methods:
            raise ValueError("methods is empty: measure at least one")

    def seconds(self, method: str, numel: float) -> float:
        """Return the seconds that ``method`` takes for a vector.

        Raises:
            ValueError: the method was not measured.
        """
        if method not in self.methods:
            raise ValueError(f"the table of selections holds {', '.join(self.methods)}, not {method}: measure it")
        return self.methods[method].at(numel)

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Self:
        curves = {name: _curve(f"methods.{name}", row) for name, row in _mapping("methods", values).items()}
        return cls(**{**values, "methods": curves})


def _checked_fields(cls: type, found: object, where: str = "") -> dict[str, Any]:
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


def _mapping(name: str, values: dict[str, Any]) -> dict[Any, Any]:
    if not isinstance(values[name], dict):
        raise ValueError(f"{name} must be a mapping, got {type(values[name]).__name__}")
    found: dict[Any, Any] = values[name]
    return found


def _curve(where: str, row: object) -> Curve:
    values = _checked_fields(Curve, row, f"{where}: ")
    lists: dict[str, Any] = {}
    for name in ("sizes", "seconds"):
        if not isinstance(values[name], list):
            raise ValueError(f"{where}: {name} must be a list, got {type(values[name]).__name__}")
        lists[name] = tuple(values[name])
    try:
        return Curve(**lists)  # the fit is computed again: one stored in the file might not belong to the points
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _number(name: str, value: object, *, lowest: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= lowest
    if not good:
        raise ValueError(f"{name} must be a number of at least {lowest:g}, got {value!r}")


def _whole(name: str, value: object, *, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
