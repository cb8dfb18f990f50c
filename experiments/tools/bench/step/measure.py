"""Measure steps of one method, with one revision or with two in alternating turns."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.tools.bench.tables import slowest_of
from experiments.tools.profile import method_steps
from experiments.tools.profile.method_steps import Times
from experiments.tools.ranks.group import RankGroup

WARMUP = 40  # in so many steps residuals fill up, and thresholds change
LEAST_WARMUP = 10
LEAST_STEPS = 5

Sides = Mapping[str, RankGroup]  # the ranks of each revision, by its name
Turn = dict[str, list[Times]]  # steps of each side, on the slowest rank


class Case(NamedTuple):
    """A method at one length and density."""

    method: str
    numel: int
    density: float


def measure(sides: Sides, case: Case, steps: int, limit_s: float, *, num_turns: int) -> list[Turn]:
    """Return the turns of a case: in each, every side takes equally many steps, in alternating order.

    Args:
        steps: per side, in all turns together, after a warm-up.
        limit_s: approximate time limit for all of them.
    """
    step_s = max(max(ranks.call(method_steps.begin, case.method, case.numel, case.density)) for ranks in sides.values())
    affordable = int(limit_s / (len(sides) * step_s))  # a slow method gets fewer
    counted = min(steps, max(LEAST_STEPS, affordable // 4))
    warmup = min(WARMUP, max(LEAST_WARMUP, affordable - counted))
    for ranks in sides.values():
        ranks.call(method_steps.turn, warmup - method_steps.NUM_TRIED)
    found, size = [], math.ceil(counted / num_turns)
    for number in range(num_turns):
        order = list(sides) if number % 2 else list(sides)[::-1]
        found.append({side: slowest(sides[side].call(method_steps.turn, size)) for side in order})
    return found


def slowest(ranks: Sequence[Sequence[Times]]) -> list[Times]:
    """Return for each step the largest value over ranks, per key, and ``floors``: its time in floors."""
    return [{**row, "floors": row["own_s"] / row["floor_s"]} for row in slowest_of(ranks)]
