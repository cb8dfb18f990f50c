"""A fragment: parameters that are exchanged together, and the progress of their exchange."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from micro.comm.ranks import Spans
from micro.local.exchange import Exchange
from micro.local.outer import MakeOuter
from micro.local.round_stats import RoundStats
from micro.local.weights import FlatWeights
from micro.reducers.base import Reducer
from micro.reducers.stats import StepStats
from micro.values.flat import real


class Fragment:
    """Parameters that are exchanged together, one vector per dtype.

    Args:
        number: of the fragment, from 0.
        phase: the step of a round, from 1, at which its exchange begins.

    Attributes:
        vectors: the weights.
        num_rounds: number of finished exchanges.
        num_steps: inner steps since the last exchange began.
        has_local_progress: whether this rank's parameters may differ from the global weights.
        under_way: the unfinished exchange, or None.
    """

    def __init__(
        self, number: int, phase: int, parameters: Mapping[str, Tensor], reducer: Reducer, outer: MakeOuter
    ) -> None:
        self.number, self.phase = number, phase
        dtypes = {name: real(parameter.detach()).dtype for name, parameter in parameters.items()}
        self.vectors = [
            FlatWeights({name: p for name, p in parameters.items() if dtypes[name] == dtype}, reducer, outer)
            for dtype in dict.fromkeys(dtypes.values())
        ]
        self.num_rounds = self.num_steps = 0
        self.has_local_progress = False
        self.under_way: Exchange | None = None

    def advance(self) -> None:
        """Count an inner step."""
        self.num_steps += 1
        self.has_local_progress = True
        if self.under_way is not None:
            self.under_way.age += 1

    def begin_exchange(self, buffers: Mapping[str, Tensor]) -> Exchange:
        """Compute this rank's weight differences and begin an exchange."""
        for vector in self.vectors:
            vector.moved = vector.difference()
        place = {"round": self.num_rounds, "fragment": self.number, "num_steps": self.num_steps}
        self.under_way, self.num_steps = Exchange(self.vectors, buffers, **place), 0
        return self.under_way

    def step(self, mix: float) -> None:
        """Take the outer step; the parameters become the new global weights, or are mixed with them."""
        for vector in self.vectors:
            vector.step()
            vector.mix(mix)
        self.has_local_progress = mix < 1

    def restart(self) -> None:
        """Make the current parameters the global weights; drop an unfinished exchange."""
        self.under_way = None
        for vector in self.vectors:
            vector.restart()
        self.num_steps, self.has_local_progress = 0, False

    def go_back(self) -> None:
        """Reset the parameters to the global weights; an unfinished exchange continues."""
        for vector in self.vectors:
            vector.mix(1.0)
        self.num_steps, self.has_local_progress = 0, False

    def save(self) -> dict[str, Any]:
        """Return what the vectors do not save; waits for an unfinished exchange."""
        saved, under_way = None, self.under_way
        if under_way is not None:
            stats = _plain(under_way.result())
            buffers = {name: each.clone() for name, each in under_way.buffers.items()}
            saved = {"age": under_way.age, "stats": stats, "buffers": buffers}
        return {
            "num_rounds": self.num_rounds,
            "num_steps": self.num_steps,
            "is_apart": self.has_local_progress,
            "under_way": saved,
        }

    def load(self, saved: Mapping[str, Any], vectors: list[dict[str, Any]]) -> None:
        """Load what ``save`` returned, and the vectors' states."""
        for vector, state in zip(self.vectors, vectors, strict=True):
            vector.load(state)
        self.num_rounds, self.num_steps = saved["num_rounds"], saved["num_steps"]
        self.has_local_progress, ended, self.under_way = saved["is_apart"], saved["under_way"], None
        if ended is not None:
            stats = _restored(ended["stats"])
            self.under_way = Exchange.ended(self.vectors, ended["buffers"], stats, age=ended["age"])


def _plain(stats: RoundStats) -> dict[str, Any]:
    """Return statistics as plain data, with times as numbers."""
    times = [Spans(select=each.select_s, exchange=each.exchange_s, rest=each.rest_s) for each in stats.vectors]
    vectors = tuple(replace(each, spans=spans) for each, spans in zip(stats.vectors, times, strict=True))
    return asdict(replace(stats, vectors=vectors))


def _restored(saved: Mapping[str, Any]) -> RoundStats:
    vectors = tuple(StepStats(**{**vector, "spans": Spans(**vector["spans"])}) for vector in saved["vectors"])
    return RoundStats(**{**saved, "vectors": vectors})
