"""Predict the time of a step from profiles of the same hosts and a schedule."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import micro
from experiments.planning.problem import problem_of
from experiments.planning.schedules.base import Problem, Schedule, timeline
from experiments.planning.tables import LinkTable, SelectTable
from experiments.planning.traces import Trace
from experiments.tools.profile import backward, link, select
from experiments.tools.ranks.group import RankGroup
from experiments.tools.ranks.hosts import bits_per_s
from experiments.tools.simulate.steps import rescaled

STEPS = 8  # steps of each profile
LINK_SIZES = (64, 4096, 65_536)  # latency only, and up to a TCP packet
LARGEST_S, LARGEST_BYTES = 0.1, 2**22  # time and size limit of the largest message; beyond, time is linear
REPEATS = 15


def profile_model(ranks: RankGroup, overrides: list[str]) -> Trace:
    """Return the trace of the model, as measured by ``profile backward``."""
    settings = backward.prepare(argparse.Namespace(steps=STEPS, overrides=overrides), ranks.world_size)
    return backward.merge(ranks.call(backward.work, settings)[0])


def profile_methods(ranks: RankGroup, methods: Sequence[str], numel: int, density: float) -> SelectTable | None:
    """Return the methods' computation without collectives, as measured by ``profile select``."""
    if not methods:
        return None
    lengths = sorted({max(2, numel // 1024), max(2, numel // 16), numel})
    settings = {"methods": list(methods), "density": density, "numel": lengths, "steps": STEPS}
    return select.merge(ranks.call(select.work, settings)[0], density)


def measure_link(ranks: RankGroup, rate: str, seconds: float) -> LinkTable:
    """Return the times of collectives on the current links, as measured by ``profile link``."""
    largest = min(LARGEST_BYTES, max(LINK_SIZES[-1] * 8, round(LARGEST_S * bits_per_s(rate) / 8)))
    sizes = [*LINK_SIZES, largest // 16 * 4, largest // 4 * 4]
    settings = {"sizes": sizes, "repeats": REPEATS, "seconds": seconds}
    return link.merge(ranks.call(link.work, settings)[0], rate)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicts the time of a step from measurements of model, methods and link.

    Attributes:
        ahead_s: head start of a link after a pause (its burst). Collectives were measured without pauses; between two
            steps links pause.
    """

    trace: Trace
    select: SelectTable | None
    network: LinkTable
    ahead_s: float

    def problem(self, method: str, reducer: micro.Reducer, compute_s: float | None = None) -> Problem:
        """Return a schedule's problem for a method; ``compute_s``: seconds of a step without communication."""
        trace = self.trace if compute_s is None else rescaled(self.trace, compute_s)
        select = partial(self.select.seconds, method) if self.select else None
        return problem_of(trace, self.network, reducer, select=select)

    def step_s(self, method: str, reducer: micro.Reducer, schedule: Schedule | None, compute_s: float) -> float:
        """Return the seconds of a step.

        Args:
            schedule: None for the method's default: DDP's buckets for dense, a single one for others.
            compute_s: seconds of a step without communication, measured next to the predicted steps, since the
                machine's speed may have changed after the profile.
        """
        own = "ddp" if isinstance(reducer, micro.DenseReducer) else "single"
        schedule = schedule or micro.build(Schedule, own)
        ends = schedule.cut(self.problem(method, reducer))
        found = timeline(self.problem(method, reducer, compute_s), ends)
        return found.step_s - min(self.ahead_s, found.exposed_s)
