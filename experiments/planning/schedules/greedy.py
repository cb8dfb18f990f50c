"""The schedule MG-WFBP: one greedy pass that decides for each gradient whether to merge it with the next."""

from dataclasses import dataclass
from typing import ClassVar

from experiments.planning.schedules.base import Ends, Problem, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class MgWfbp(Schedule):
    """Merge a gradient with the next one if waiting is shorter than the latency that it saves.

    The rule looks only at two neighbours: many short waits in a row may cost more than they save. `exact` avoids that.

    Source: Shi, Chu and Li, MG-WFBP, INFOCOM 2019 and IEEE TPDS 2021, arXiv 1912.09268, theorem 1. Differences: one
    pass instead of recomputing all start times after each merge, with the same groups; the saved latency is T(x) + T(y)
    - T(x + y), for any cost function (the paper's ``a`` if T(x) = a + b x; the public code has a table of a and b for
    two clusters). As in the paper, costs other than the exchange (selection) are ignored.
    """

    name: ClassVar[str] = "mgwfbp"

    def cut(self, problem: Problem) -> Ends:
        """Return the published groups."""
        exchange, ready_s, num_layers = problem.exchange, problem.ready_s, len(problem.trace.layers)
        ends, start, lane = list[int](), 0, 0.0  # lane: end of the earlier groups' reduction
        for stop in range(1, num_layers):
            group, layer = problem.num_bytes(start, stop), problem.num_bytes(stop, stop + 1)
            saved = exchange(group) + exchange(layer) - exchange(group + layer)  # the latency, if the cost is affine
            sent = max(lane, ready_s[stop - 1])
            if saved >= 0 and ready_s[stop] - sent < saved:
                continue
            lane = sent + exchange(group)
            ends.append(stop)
            start = stop
        return (*ends, num_layers)
