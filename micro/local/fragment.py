"""Parameters that are exchanged together, and how far their exchange is."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from micro.flat import real
from micro.local.exchange import Exchange, Result
from micro.local.flat_weights import FlatWeights
from micro.local.outer import MakeOuter
from micro.local.round_stats import RoundStats
from micro.reducers.base import Reducer
from micro.spans import Spans
from micro.stats import StepStats


class Fragment:
    """Parameters that are exchanged together, a vector for each dtype.

    Args:
        number: of the fragment, from 0.
        phase: the step of a round, from 1, at which its exchange begins.

    Attributes:
        weights: the vectors.
        num_rounds: exchanges that have ended.
        num_steps: inner steps since the last exchange began.
        is_apart: whether this rank's parameters may differ from the global weights.
        under_way: the exchange that has begun and not ended; None where there is none.
    """

    def __init__(
        self, number: int, phase: int, parameters: Mapping[str, Tensor], reducer: Reducer, outer: MakeOuter
    ) -> None:
        self.number, self.phase = number, phase
        dtypes = {name: real(parameter.detach()).dtype for name, parameter in parameters.items()}
        self.weights = [
            FlatWeights({name: p for name, p in parameters.items() if dtypes[name] == dtype}, reducer, outer)
            for dtype in dict.fromkeys(dtypes.values())
        ]
        self.num_rounds = self.num_steps = 0
        self.is_apart = False
        self.under_way: Exchange | None = None

    def advance(self) -> None:
        """Count an inner step."""
        self.num_steps += 1
        self.is_apart = True
        if self.under_way is not None:
            self.under_way.age += 1

    def step(self, mix: float) -> None:
        """Take the outer step; the parameters become the new global weights, or a mixture with what they are."""
        for vector in self.weights:
            vector.step()
            if mix < 1:
                vector.mix(mix)
            else:
                vector.restart()
        self.is_apart = mix < 1

    def begin(self) -> None:
        """Take the parameters as they are for the global weights; an exchange under way is forgotten."""
        self.under_way = None
        for vector in self.weights:
            vector.begin()
        self.num_steps, self.is_apart = 0, False

    def go_back(self) -> None:
        """Give the parameters the global weights; an exchange under way goes on."""
        for vector in self.weights:
            vector.restart()
        self.num_steps, self.is_apart = 0, False

    def save(self) -> dict[str, Any]:
        """Return what the vectors do not save: where the fragment is, and what its exchange has given.

        Waits for the end of an exchange that is under way.
        """
        under_way = self.under_way
        return {
            "num_rounds": self.num_rounds,
            "num_steps": self.num_steps,
            "is_apart": self.is_apart,
            "under_way": under_way and {"age": under_way.age, **_plain(under_way.result())},
        }

    def save_vectors(self) -> list[dict[str, Any]]:
        """Return the states of the vectors."""
        if self.under_way is not None:
            self.under_way.result()
        return [vector.save(is_apart=self.is_apart) for vector in self.weights]

    def load(self, saved: Mapping[str, Any], vectors: list[dict[str, Any]]) -> None:
        """Go on from what ``save`` and ``save_vectors`` returned."""
        for vector, state in zip(self.weights, vectors, strict=True):
            vector.load(state)
        self.num_rounds, self.num_steps = saved["num_rounds"], saved["num_steps"]
        self.is_apart = saved["is_apart"]
        ended = saved["under_way"]
        self.under_way = None if ended is None else Exchange.ended(_result(ended), ended["age"])


def _plain(result: Result) -> dict[str, Any]:
    stats = asdict(replace(result.stats, vectors=tuple(_timed(vector) for vector in result.stats.vectors)))
    return {"stats": stats, "buffers": [buffer.clone() for buffer in result.buffers]}


def _timed(stats: StepStats) -> StepStats:
    """Return statistics whose times are numbers."""
    return replace(stats, spans=Spans(select=stats.select_s, exchange=stats.exchange_s, rest=stats.rest_s))


def _result(saved: Mapping[str, Any]) -> Result:
    stats = dict(saved["stats"])
    vectors = tuple(StepStats(**{**vector, "spans": Spans(**vector["spans"])}) for vector in stats.pop("vectors"))
    return Result(RoundStats(vectors=vectors, **stats), list(saved["buffers"]))
