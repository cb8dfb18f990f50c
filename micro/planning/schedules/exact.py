"""The optimal groups for gradients that need no selection."""

from dataclasses import dataclass
from typing import ClassVar

from micro.planning.schedules.base import Ends, Problem, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact(Schedule):
    """Find the groups with which all gradients are reduced earliest, whatever an exchange costs.

    Dynamic programming over where the last group starts: the first j layers are reduced at
    E(j) = min over i < j of max(E(i), ready(j)) + T(bytes of i..j), because a lane that is free earlier is never
    worse. O(layers^2). T may be any function of the size: affine, measured, or with jumps.

    Where the problem has a selection, it is counted as if it occupied the lane and did not hold up backward: a good
    plan then, not the best; that one is `sparse_exact`'s.

    Source: the step model of MG-WFBP (Shi, Chu and Li, INFOCOM 2019, arXiv 1912.09268) with the optimum over all
    groupings in place of its greedy rule.
    """

    name: ClassVar[str] = "exact"

    def cut(self, problem: Problem) -> Ends:
        """Return the best groups; of equally good ones those with the longest last group."""

        def seconds(start: int, stop: int) -> float:
            num_bytes = problem.num_bytes(start, stop)
            return problem.select(num_bytes) + problem.exchange(num_bytes)

        best = [(0.0, 0)]  # for the first j layers: when they are reduced, and where their last group starts
        for stop, ready in enumerate(problem.ready_s, start=1):
            best.append(min((max(best[start][0], ready) + seconds(start, stop), start) for start in range(stop)))
        return _ends([start for _, start in best])


def _ends(starts: list[int]) -> Ends:
    """Return the ends of the groups, where starts[j] is the start of the group that ends at j."""
    ends: list[int] = []
    stop = len(starts) - 1
    while stop:
        ends.append(stop)
        stop = starts[stop]
    return tuple(reversed(ends))
