"""What a row of the table is, and the makers that rows share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import micro
from micro.testing import BUILD_UP, EXACT, Band, Promises

__all__ = ["ABOUT", "ALONE", "BUILD_UP", "EXACT", "GATHER", "Band", "Make", "Row", "always", "sparse", "whole"]

GATHER, ALONE = micro.Gather(), micro.NoFeedback()
ABOUT = {"traffic_within": 0.15}  # bytes depend on more than what parts expect: regions, room for candidates

Make = Callable[[micro.Density[Any] | float, int], micro.Reducer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method and what it promises.

    Attributes:
        name: of the row.
        make: density or schedule, seed -> reducer.
        band: where the density ends up; None where it is not controlled.
        conserves_mass, traffic_within, names_rank, mixes, dense, ranks_per_node: see `micro.testing.Promises`.
        num_collectives: the fewest of a step on three or four ranks, where parts do not state their traffic.
        follows_density: the target is the given density (dense ignores it, Accordion derives its own).
        seeded: another seed gives other indices.
        updated: elements of the update that are not zero are as many as are counted, or some of them, because codes of
            few bits round to zero, or have nothing to do with what is counted: the bins of a spectrum.
    """

    name: str
    make: Make
    band: Band | None = None
    conserves_mass: bool = True
    traffic_within: float | None = 0.02
    names_rank: bool = True
    mixes: bool = False
    dense: tuple[str, ...] = ()
    ranks_per_node: int = 1
    num_collectives: int | None = None
    follows_density: bool = True
    seeded: bool = False
    updated: Literal["all", "some", "other"] = "all"

    def world_size(self, at_least: int) -> int:
        """Return the smallest number of ranks from ``at_least`` on that the method takes: whole nodes."""
        return -(-at_least // self.ranks_per_node) * self.ranks_per_node

    @property
    def promises(self) -> Promises:
        """What `micro.testing` checks."""
        return Promises(
            band=self.band,
            conserves_mass=self.conserves_mass,
            traffic_within=self.traffic_within,
            names_rank=self.names_rank,
            mixes=self.mixes,
            dense=self.dense,
            ranks_per_node=self.ranks_per_node,
        )


def sparse(name: str, selector: micro.Selector[Any], band: Band | None, *, promises: Any = None, **parts: Any) -> Row:
    """Return the row of the sparse reducer that is composed of these parts.

    Args:
        promises: fields of the row that are not as usual.
    """
    reducer = micro.SparseReducer(selector, 0.05, **parts)
    return Row(
        name=name,
        make=lambda density, seed: replace(reducer, density=density, seed=seed),
        band=band,
        **promises or {},
    )


def always(name: str, reducer: micro.Reducer, **promises: Any) -> Row:
    """Return the row of a reducer that takes no density."""
    promises = {"band": EXACT} | promises
    return Row(name=name, make=lambda _density, _seed: reducer, follows_density=False, **promises)


def whole(name: str, selector: micro.Selector[Any], *, promises: Any = None, **parts: Any) -> Row:
    """Return the row of a method that sends every value, whatever density it is given."""
    reducer = micro.SparseReducer(selector, 1.0, **parts)
    return Row(
        name=name,
        make=lambda _density, seed: replace(reducer, seed=seed),
        band=EXACT,
        follows_density=False,
        **promises or {},
    )
