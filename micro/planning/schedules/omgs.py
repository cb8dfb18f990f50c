"""OMGS: the rule of MG-WFBP for gradients that are selected before they are sent."""

from dataclasses import dataclass
from typing import ClassVar

from micro.parts import Rule, check_rule
from micro.planning.schedules.base import Ends, Problem, Schedule
from micro.planning.schedules.greedy import Pair, greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Omgs(Schedule):
    """Merge two neighbours if that saves more start-up than it costs in waiting and selection.

    Like MG-WFBP it decides about two neighbours at a time and does not see that a selection delays all of backward
    that follows; `sparse_exact` sees it. Without selection the repaired rule is MG-WFBP's.

    Args:
        rule: 'repaired', merge if the two are reduced earlier together than apart; 'published', the condition of the
            public code, whose waiting time lacks the selection of the second gradient, so that it merges too eagerly.

    Source: Shi et al., Communication-efficient distributed deep learning with merged gradient sparsification on GPUs
    (OMGS-SGD), INFOCOM 2020, and its public code. Differences of both rules: one pass, as in `mgwfbp`; the costs are
    those of the problem, where the code has s x log2(x) for a selection and two all-gathers from a table of one
    network; the gradient of the last layer is treated as all others, where the code leaves it out of the decisions.

    Raises:
        ValueError: no such rule.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "omgs"

    def __post_init__(self) -> None:
        check_rule(self)

    def cut(self, problem: Problem) -> Ends:
        """Return the groups of the rule."""
        saves = {"repaired": _are_earlier, "published": _wait_less}[self.rule]
        return greedy(problem, lambda pair: saves(problem, pair))


def _are_earlier(problem: Problem, pair: Pair) -> bool:
    """Return whether the two are reduced earlier together than one after the other."""
    group, layer = pair.group_bytes, pair.next_bytes
    select, exchange = problem.select, problem.exchange
    together = max(pair.lane_s, pair.next_s + select(group + layer)) + exchange(group + layer)
    first = max(pair.lane_s, pair.ready_s + select(group)) + exchange(group)
    return together < max(first, pair.next_s + select(group) + select(layer)) + exchange(layer)


def _wait_less(problem: Problem, pair: Pair) -> bool:
    """Return whether the public code's waiting time is shorter than the start-up that merging saves."""
    select, group, layer = problem.select, pair.group_bytes, pair.next_bytes
    sent = max(pair.lane_s, pair.ready_s + select(group))
    queued = sent - pair.ready_s - select(group)
    more_select = select(group + layer) - select(group) - select(layer)
    return pair.next_s - pair.ready_s + more_select - queued < pair.saved(problem.exchange)
