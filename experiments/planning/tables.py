"""Measured tables: seconds over sizes, of a network's collectives and of methods' computation."""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from experiments.planning.documents import Document
from micro.comm.ranks import OPS, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Measured seconds over ascending ``sizes``, linearly interpolated.

    Attributes:
        alpha_s, beta_s: the line alpha + beta * size with the least relative error.
        error: the largest relative distance of a point from that line.

    Raises:
        ValueError: fewer than two points, or sizes that do not ascend.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    alpha_s: float = field(init=False)
    beta_s: float = field(init=False)
    error: float = field(init=False)

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.seconds) or len(self.sizes) < 2:
            given = f"{len(self.sizes)} and {len(self.seconds)}"
            raise ValueError(f"sizes and seconds must be two or more each, got {given}")
        for before, size in pairwise(self.sizes):
            if size <= before:
                raise ValueError(f"sizes must rise, got {size} after {before}")
        for name, value in zip(("alpha_s", "beta_s", "error"), self._fit(), strict=True):
            object.__setattr__(self, name, value)

    def at(self, size: float) -> float:
        """Return the seconds for a size, interpolated, or extrapolated from the two nearest points."""
        place = min(max(bisect.bisect_right(self.sizes, size), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))

    def _fit(self) -> tuple[float, float, float]:
        """Fit by least squares of relative errors, with an intercept that is not negative."""
        points = [(1 / y**2, x, y) for x, y in zip(self.sizes, self.seconds, strict=True) if y**2 > 0]
        if not points:
            return 0.0, 0.0, 0.0
        sw, swx, swy = (sum(column) for column in zip(*((w, w * x, w * y) for w, x, y in points), strict=True))
        swxx, swxy = sum(w * x * x for w, x, _ in points), sum(w * x * y for w, x, y in points)
        spread = sw * swxx - swx**2
        beta = max(0.0, (sw * swxy - swx * swy) / spread) if spread > 0 else 0.0
        alpha = (swy - beta * swx) / sw
        if alpha < 0:
            alpha, beta = 0.0, swxy / swxx
        return alpha, beta, max(abs(alpha + beta * x - y) / y for _, x, y in points)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable(Document):
    """The seconds of collectives in one group of ranks.

    Attributes:
        world_size, backend, link: of the measured group; link is a name for titles.
        collectives: a curve per operation of Comm. Sizes are bytes: of the vector for all_reduce and broadcast; of one
            rank's contribution for gather_rows and gather_lists; sent by one rank to all others for scatter.

    Raises:
        ValueError: no ranks, an operation that does not exist, or no all_reduce.
    """

    format: ClassVar[str] = "micro-link-1"
    world_size: int
    backend: str = "unknown"
    link: str = "unknown"
    collectives: Mapping[Op, Curve]

    def __post_init__(self) -> None:
        _check_world_size(self.world_size)
        if "all_reduce" not in self.collectives or not set(self.collectives) <= set(OPS):
            given = ", ".join(self.collectives) or "none"
            raise ValueError(f"collectives must be among {', '.join(OPS)}, with the first, got {given}")

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective. Raises: ValueError: it was not measured."""
        if op not in self.collectives:
            held = ", ".join(self.collectives)
            raise ValueError(f"the link table holds {held}, not {op}: measure the link again")
        return self.collectives[op].at(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectTable(Document):
    """The computation of a reduction without its collectives: seconds over the number of elements, per method.

    Attributes:
        world_size: of the measured group.
        methods: a curve for each name of conf/sparsifier; sizes are numbers of elements.

    Raises:
        ValueError: no ranks, a density outside (0, 1], or no method.
    """

    format: ClassVar[str] = "micro-select-1"
    world_size: int
    density: float
    device: str = "unknown"
    methods: Mapping[str, Curve]

    def __post_init__(self) -> None:
        _check_world_size(self.world_size)
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}")
        if not self.methods:
            raise ValueError("methods is empty: measure at least one")

    def seconds(self, method: str, numel: float) -> float:
        """Return the seconds that ``method`` takes for a vector. Raises: ValueError: it was not measured."""
        if method not in self.methods:
            raise ValueError(f"the table of selections holds {', '.join(self.methods)}, not {method}: measure it")
        return self.methods[method].at(numel)


def _check_world_size(world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
