"""The density by_name: different densities for parameters whose names match patterns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import Density, Target, check_density, target_count
from micro.parts import NoState
from micro.values.flat import Layout
from micro.values.names import as_patterns, check_matched, matches


@dataclass(frozen=True, slots=True, kw_only=True)
class ByName(Density[NoState]):
    """A density for the parameters whose names match a pattern, and one for all others.

    Use it with selectors that select in each parameter separately: ``TopK(scope="layer")``, ``PerTensor``.

    Args:
        patterns: densities by pattern, for instance ``{"embed*": 0.1}``: ``*`` is any text, ``?`` one character,
            ``[ab]`` a or b; the first match counts. A mapping, or pairs.
        density: of all other parameters.

    Raises:
        ValueError: no patterns, or a density outside of (0, 1]; from check_parameters: a pattern that matches nothing.
    """

    patterns: Mapping[str, float] | Sequence[tuple[str, float]]
    density: float
    name: ClassVar[str] = "by_name"
    by_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_density(self.density)
        pairs = self.patterns.items() if isinstance(self.patterns, Mapping) else self.patterns
        try:
            checked = tuple((as_patterns(pattern, "patterns")[0], density) for pattern, density in pairs)
        except (TypeError, ValueError):
            checked = ()
        if not checked:
            raise ValueError(f"patterns of by_name must be densities by pattern, got {self.patterns!r}")
        for pattern, density in checked:
            check_density(density, f"density of '{pattern}'")
        object.__setattr__(self, "patterns", checked)

    @property
    def _pairs(self) -> tuple[tuple[str, float], ...]:
        assert isinstance(self.patterns, tuple)
        return self.patterns

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError if a pattern matches no parameter; see Density."""
        check_matched([pattern for pattern, _ in self._pairs], shapes, "patterns")

    def of(self, name: str) -> float:
        """Return the density of the parameter ``name``."""
        return next((density for pattern, density in self._pairs if matches((pattern,), name)), self.density)

    def target(self, state: NoState, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Reduction[Target]:
        """Return the density of each parameter, and of the whole."""
        yield from ()
        return self.settled(layout)

    def settled(self, layout: Layout) -> Target:
        """Return the target, which is equal in every step; see Density."""
        densities = tuple(map(self.of, layout.names))
        pairs = zip(densities, layout.numels, strict=True)
        count = sum(target_count(density, numel) for density, numel in pairs if numel)
        return Target(count / layout.numel, count, densities)
