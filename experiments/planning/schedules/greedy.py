"""MG-WFBP: one pass from the first gradient to the last, which decides whether each waits for the next one."""

from dataclasses import dataclass
from typing import ClassVar

from experiments.planning.schedules.base import Ends, Problem, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class MgWfbp(Schedule):
    """Let a gradient wait for the next one if the wait is shorter than the start-up that it saves.

    The rule looks at two neighbours at a time, each wait by itself: many short waits in a row may cost more than they
    save. `exact` does not have that weakness.

    Source: Shi, Chu and Li, MG-WFBP, INFOCOM 2019 and IEEE TPDS 2021, arXiv 1912.09268, theorem 1. Differences: one
    pass instead of a re-computation of all start times after each merge, with the same groups; the start-up is what
    the cost itself shows for the two pieces, T(x) + T(y) - T(x + y), which is the paper's ``a`` where T(x) = a + b x,
    so a cost need not be affine; the public code looks up a and b in a table of two clusters. As in the paper, what
    gradients cost beside their exchange (a selection) is ignored.
    """

    name: ClassVar[str] = "mgwfbp"

    def cut(self, problem: Problem) -> Ends:
        """Return the published groups."""
        exchange, ready_s, num_layers = problem.exchange, problem.ready_s, len(problem.trace.layers)
        ends, start, lane = list[int](), 0, 0.0  # lane: when the earlier groups are reduced
        for stop in range(1, num_layers):
            group, layer = problem.num_bytes(start, stop), problem.num_bytes(stop, stop + 1)
            saved = exchange(group) + exchange(layer) - exchange(group + layer)  # the start-up, where cost is affine
            sent = max(lane, ready_s[stop - 1])
            if saved >= 0 and ready_s[stop] - sent < saved:
                continue
            lane = sent + exchange(group)
            ends.append(stop)
            start = stop
        return (*ends, num_layers)
