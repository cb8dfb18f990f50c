"""What a row of the table is, and the makers that rows share."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import micro
from micro.testing import BUILD_UP, EXACT, Band, Promises

__all__ = ["ABOUT", "ALONE", "BUILD_UP", "EXACT", "GATHER", "LOSSY", "Band", "Make", "Row", "row", "sparse", "whole"]

GATHER, ALONE = micro.Gather(), micro.NoFeedback()
ABOUT: dict[str, Any] = {"traffic_within": 0.15}  # bytes depend on more than what parts expect: regions, candidates
LOSSY: dict[str, Any] = {"conserves_mass": False}

Make = Callable[[micro.Density[Any] | float, int], micro.Reducer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method and what it promises.

    Attributes:
        name: of the row.
        make: density or schedule, seed -> reducer.
        promises: what `micro.testing` checks.
        num_collectives: the fewest of a step on three or four ranks, where parts do not state their traffic.
        follows_density: the target is the given density (dense ignores it, ByName adds its own).
        seeded: another seed gives other indices.
        updated: elements of the update that are not zero are as many as are counted, or some of them, because codes of
            few bits round to zero, or have nothing to do with what is counted: the bins of a spectrum.
    """

    name: str
    make: Make
    promises: Promises
    num_collectives: int | None = None
    follows_density: bool = True
    seeded: bool = False
    updated: Literal["all", "some", "other"] = "all"

    def world_size(self, at_least: int) -> int:
        """Return the smallest number of ranks from ``at_least`` on that the method takes: whole nodes."""
        per_node = self.promises.ranks_per_node
        return -(-at_least // per_node) * per_node


PROMISES = {field.name for field in fields(Promises)}
PROMISED = PROMISES | {field.name for field in fields(Row)}


def given(reducer: Any, **settings: Any) -> Any:
    """Return the reducer with a density and a seed, if it, or its inner reducer, has these."""
    inner = {"reducer": given(reducer.reducer, **settings)} if hasattr(reducer, "reducer") else {}
    return replace(reducer, **inner, **{name: value for name, value in settings.items() if hasattr(reducer, name)})


def row(name: str, method: micro.Reducer | Make, band: Band | None, **promised: Any) -> Row:
    """Return the row of a method with its promises."""
    promises = Promises(band=band, **{key: value for key, value in promised.items() if key in PROMISES})
    own = {key: value for key, value in promised.items() if key not in PROMISES}
    make = (lambda density, seed: given(method, density=density, seed=seed)) if _is_reducer(method) else method
    return Row(name=name, make=make, promises=promises, **own)


def _is_reducer(method: micro.Reducer | Make) -> bool:
    return isinstance(method, micro.Reducer)


def sparse(name: str, selector: micro.Selector[Any], band: Band | None, **parts: Any) -> Row:
    """Return the row of the sparse reducer that is composed of these parts; what is no part is a promise."""
    promised = {key: parts.pop(key) for key in PROMISED & parts.keys()}
    return row(name, micro.SparseReducer(selector, 0.05, **parts), band, **promised)


def whole(name: str, selector: micro.Selector[Any], **parts: Any) -> Row:
    """Return the row of a method that sends every value, whatever density it is given."""
    promised = {key: parts.pop(key) for key in PROMISED & parts.keys()}
    reducer = micro.SparseReducer(selector, 1.0, **parts)
    return row(name, lambda _, seed: replace(reducer, seed=seed), EXACT, follows_density=False, **promised)
