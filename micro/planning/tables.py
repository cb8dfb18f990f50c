"""What was measured of a network and of the methods: seconds over sizes."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from micro.operations import OPS, Op
from micro.planning.documents import Document, check_number, check_whole, checked_fields, mapping


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
            check_number(f"sizes[{place}]", size, lowest=0.0)
            check_number(f"seconds[{place}]", seconds, lowest=0.0)
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
class CurveTable(Document):
    """Seconds over sizes of several things, each a curve; ``curves_of`` names the field that holds them.

    Attributes:
        world_size: of the group that was measured.
    """

    curves_of: ClassVar[str]
    title: ClassVar[str]
    remedy: ClassVar[str]
    world_size: int

    def __post_init__(self) -> None:
        check_whole("world_size", self.world_size, lowest=1)
        self._check()

    def _check(self) -> None:
        """Raise ValueError where a field of this kind of table is out of its range."""

    def _at(self, name: str, size: float) -> float:
        curves: Mapping[str, Curve] = getattr(self, self.curves_of)
        if name not in curves:
            raise ValueError(f"the {self.title} holds {', '.join(curves)}, not {name}: {self.remedy}")
        return curves[name].at(size)

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Self:
        field = cls.curves_of
        curves = {name: _curve(f"{field}.{name}", row) for name, row in mapping(field, values).items()}
        return cls(**{**values, field: curves})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable(CurveTable):
    """How long the collectives of one group of ranks take.

    Attributes:
        world_size, backend, link: of the group that was measured; link is a name for titles.
        collectives: a curve per operation of Comm. Sizes are bytes: of the vector for all_reduce and broadcast,
            of what one rank contributes for gather_rows and gather_lists, of what one rank sends to all others
            together for scatter.

    Raises:
        ValueError: an operation that does not exist, or none at all.
    """

    format: ClassVar[str] = "micro-link-1"
    curves_of: ClassVar[str] = "collectives"
    title: ClassVar[str] = "link table"
    remedy: ClassVar[str] = "measure the link again"
    backend: str = "unknown"
    link: str = "unknown"
    collectives: Mapping[Op, Curve]

    def _check(self) -> None:
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
        return self._at(op, num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectTable(CurveTable):
    """What a reduction costs beside its collectives: seconds over the number of elements, for each method.

    Attributes:
        world_size: of the group that was measured.
        density: the target density.
        device: what it was measured on.
        methods: a curve for each name of conf/sparsifier; sizes are numbers of elements.
    """

    format: ClassVar[str] = "micro-select-1"
    curves_of: ClassVar[str] = "methods"
    title: ClassVar[str] = "table of selections"
    remedy: ClassVar[str] = "measure it"
    density: float
    device: str = "unknown"
    methods: Mapping[str, Curve]

    def _check(self) -> None:
        if not (isinstance(self.density, int | float) and 0 < self.density <= 1):
            raise ValueError(f"density must be in (0, 1], got {self.density}")
        if not self.methods:
            raise ValueError("methods is empty: measure at least one")

    def seconds(self, method: str, numel: float) -> float:
        """Return the seconds that ``method`` takes for a vector.

        Raises:
            ValueError: the method was not measured.
        """
        return self._at(method, numel)


def _curve(where: str, row: object) -> Curve:
    values = checked_fields(Curve, row, f"{where}: ")
    lists: dict[str, Any] = {}
    for name in ("sizes", "seconds"):
        if not isinstance(values[name], list):
            raise ValueError(f"{where}: {name} must be a list, got {type(values[name]).__name__}")
        lists[name] = tuple(values[name])
    try:
        return Curve(**lists)  # the fit is computed again: one stored in the file might not belong to the points
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
