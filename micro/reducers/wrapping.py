"""The base class of reducers that wrap another one, and access to the inner reducers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from micro.comm.ranks import Comm
from micro.reducers.base import Reducer, check_reducer
from micro.values.finite import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappingReducer(Reducer):
    """A reducer that leaves a part of its work to another one. It is no method itself: subclasses have names.

    Names begin with the outer reducer: ``split two_level 2 topk``. A kind is around a reducer once at most, so that
    each order of different kinds has one meaning.

    Args:
        reducer: the other one.
        nonfinite: as in SparseReducer; None takes the reducer's.

    Raises:
        ValueError: what is inside is no reducer, or has this kind around it already.
    """

    reducer: Reducer
    nonfinite: Policy | None = None

    def __post_init__(self) -> None:
        check_reducer(self.reducer)
        if any(inner.name == self.name for inner in layers(self.reducer)):
            raise ValueError(f"{self.name} can be around a reducer once, got {self.full_name}: leave one of them out")
        if self.nonfinite is not None:
            object.__setattr__(self, "reducer", replace(self.reducer, nonfinite=self.nonfinite))  # type: ignore[type-var]

    @property
    def shares_rounds(self) -> bool:
        """Whether buckets can share collectives: as those of the reducer."""
        return self.reducer.shares_rounds

    @property
    def policy(self) -> Policy:
        """What to do about NaN and Inf: the reducer's policy."""
        return self.reducer.policy

    @property
    def rule_name(self) -> str | None:
        """Which published behaviour the reducer follows."""
        return self.reducer.rule_name

    @property
    def method(self) -> str:
        """The name, and the reducer's method."""
        return f"{self.name} {self.reducer.method}"

    @property
    def full_name(self) -> str:
        """The name, and the reducer's."""
        return f"{self.name} {self.reducer.full_name}"

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a model that the reducer does not fit; see Reducer."""
        self.reducer.check_parameters(shapes)

    def prepare(self, comm: Comm, device: torch.device) -> None:
        """Make what the reducer needs of the ranks; see Reducer."""
        self.reducer.prepare(comm, device)


def layers(reducer: Reducer) -> Iterator[Reducer]:
    """Yield the reducer, then the one inside it, to the innermost."""
    yield reducer
    while isinstance(reducer, WrappingReducer):
        reducer = reducer.reducer
        yield reducer


def innermost(reducer: Reducer) -> Reducer:
    """Return the reducer that has no other inside: the method at work."""
    *_, last = layers(reducer)
    return last
