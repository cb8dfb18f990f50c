"""The time of a step as `experiments.profile` and a schedule predict it, from profiles taken on the same hosts."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import micro
from experiments.planning.schedules.base import Problem, Schedule, timeline
from experiments.planning.tables import LinkTable, SelectTable
from experiments.planning.traces import Trace
from experiments.tools.profile import backward, link, select
from experiments.tools.ranks.group import RankGroup
from experiments.tools.ranks.hosts import bits_per_s
from experiments.tools.simulate.steps import rescaled
from experiments.training.schedule_problem import problem_of

STEPS = 8  # of each profile
LINK_SIZES = (64, 4096, 65_536)  # latency alone, and what a packet of TCP holds
LARGEST_S, LARGEST_BYTES = 0.1, 2**22  # the largest message takes so long, but is no larger: beyond, time is linear
REPEATS = 15


def profile_model(ranks: RankGroup, overrides: list[str]) -> Trace:
    """Return the trace of the model: what ``profile backward`` measures."""
    settings = backward.prepare(argparse.Namespace(steps=STEPS, overrides=overrides), ranks.world_size)
    return backward.merge(ranks.call(backward.work, settings)[0])


def profile_methods(ranks: RankGroup, methods: Sequence[str], numel: int, density: float) -> SelectTable | None:
    """Return what the methods compute beside their collectives: what ``profile select`` measures."""
    if not methods:
        return None
    lengths = sorted({max(2, numel // 1024), max(2, numel // 16), numel})
    settings = {"methods": list(methods), "density": density, "numel": lengths, "steps": STEPS}
    return select.merge(ranks.call(select.work, settings)[0], density)


def measure_link(ranks: RankGroup, rate: str, seconds: float) -> LinkTable:
    """Return the collectives on links that have a rate now: what ``profile link`` measures."""
    largest = min(LARGEST_BYTES, max(LINK_SIZES[-1] * 8, round(LARGEST_S * bits_per_s(rate) / 8)))
    sizes = [*LINK_SIZES, largest // 16 * 4, largest // 4 * 4]
    settings = {"sizes": sizes, "repeats": REPEATS, "seconds": seconds}
    return link.merge(ranks.call(link.work, settings)[0], rate)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step takes, from what was measured of the model, of the methods and of the link.

    Attributes:
        ahead_s: by how much a link that has rested is ahead of its rate. Collectives were measured one right after the
            other; between two steps links rest.
    """

    trace: Trace
    select: SelectTable | None
    network: LinkTable
    ahead_s: float

    def problem(self, method: str, reducer: micro.Reducer, compute_s: float | None = None) -> Problem:
        """Return the problem that a schedule solves for a method, where a step without communication takes so long."""
        trace = self.trace if compute_s is None else rescaled(self.trace, compute_s)
        select = partial(self.select.seconds, method) if self.select else None
        return problem_of(trace, self.network, reducer, select=select)

    def step_s(self, method: str, reducer: micro.Reducer, schedule: Schedule | None, compute_s: float) -> float:
        """Return the seconds of a step.

        Args:
            schedule: None where the method brings its own: DDP's buckets for dense, one for everything else.
            compute_s: what a step without communication took beside the steps that are predicted: the machine may have
                become slower or faster since the profile, on which the plan was made.
        """
        own = "ddp" if isinstance(reducer, micro.DenseReducer) else "single"
        schedule = schedule or micro.build(Schedule, own)
        ends = schedule.cut(self.problem(method, reducer))
        found = timeline(self.problem(method, reducer, compute_s), ends)
        return found.step_s - min(self.ahead_s, found.exposed_s)
