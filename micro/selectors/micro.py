"""MiCRO: one threshold, and an exclusive slice of the vector for each rank."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from micro.comm import Comm
from micro.partition import cyclic_slice
from micro.parts import check_rule
from micro.selectors.base import Selector
from micro.selectors.micro_rules import RULES, Search
from micro.sparse import Overlap, Selection, Step

MicroRule = Literal["agreed", "repaired", "published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro(Selector[Any]):
    """Select by one threshold inside a rotating, exclusive slice.

    Each rank searches one of world_size equal slices, so index sets never overlap (no build-up) and the search costs
    numel / world_size. All ranks use the same threshold; the rule says how it follows the density asked for.

    Args:
        rule: 'agreed', the counts that ranks exchange anyway become a histogram from which all derive the cut that
            gives k in the same step; 'repaired', the threshold is steered by the last step's count, with a controller
            that is symmetric and takes its step from the tail itself; 'published', the authors' public code step for
            step.

    Source: Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967, and its public code. Differences of 'agreed' and
    'repaired': an empty slice sends nothing (the code sends one arbitrary coordinate); the threshold starts from the
    gradient's own quantile (the code: from 1 / (2 sqrt k)); the controller is not the paper's. All rules: int32
    indices; k is at least 1.

    Raises:
        ValueError: no such rule.
    """

    rule: MicroRule = "agreed"
    name: ClassVar[str] = "micro"
    overlap: ClassVar[Overlap] = Overlap.DISJOINT

    def __post_init__(self) -> None:
        check_rule(self, get_args(MicroRule))

    def start(self) -> Any:
        """Return the rule's state before the first step."""
        return RULES[self.rule].start()

    def load(self, saved: dict[str, Any]) -> Any:
        """Return the state that ``save`` described."""
        return RULES[self.rule].load(saved)

    def select(self, state: Any, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return the indices of this rank's slice that pass the step's threshold."""
        n = comm.world_size
        spans = tuple(cyclic_slice(acc.numel(), step.index, rank, n) for rank in range(n))
        start, stop = spans[comm.rank]
        found = RULES[self.rule].search(state, Search(acc[start:stop], step, comm))
        return Selection(found.indices + start, counts=found.counts, spans=spans, threshold=found.threshold)
