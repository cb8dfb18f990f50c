"""The selector micro (MiCRO): one threshold, and an exclusive slice of the vector for each rank."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import target_count
from micro.parts import check_rule
from micro.predicted_traffic import Choosing
from micro.selectors.base import Selector, Traits
from micro.selectors.micro_rules.agreed import Agreed, Search, ThresholdRule
from micro.selectors.micro_rules.published import Published
from micro.values.flat import Layout
from micro.values.partition import cyclic_slices
from micro.values.sparse import Overlap, Selection, Step

MicroRule = Literal["agreed", "published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro(Selector[Any]):
    """Select by one threshold inside a rotating, exclusive slice of the vector.

    Each rank searches one of world_size equal slices, so index sets never overlap (no build-up) and the search costs
    numel / world_size. All ranks use the same threshold, which the rule sets.

    Args:
        rule: 'agreed': exactly k, because all ranks derive the threshold from counts that they exchange anyway
            (`micro_rules.agreed`). 'published': the authors' public code, step for step (`micro_rules.published`).

    Source: Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967. Differences: int32 indices; k is at least 1; except for
    rule 'published', the threshold (code: a controller that starts at 1 / (2 sqrt k)), and an empty slice sends nothing
    (code: one arbitrary coordinate).

    Raises:
        ValueError: no such rule.
    """

    rule: MicroRule = "agreed"
    name: ClassVar[str] = "micro"
    overlap: ClassVar[Overlap] = Overlap.DISJOINT
    traits: ClassVar[Traits] = Traits.TAKES_SCALES

    def __post_init__(self) -> None:
        check_rule(self, get_args(MicroRule))

    @property
    def threshold_rule(self) -> ThresholdRule[Any]:
        """The object that implements the rule."""
        return Agreed() if self.rule == "agreed" else Published()

    @property
    def state(self) -> type[Any]:  # type: ignore[override]  # depends on the rule
        """The class of the rule's state."""
        return self.threshold_rule.state

    def select(self, state: Any, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the indices of this rank's slice that pass the step's threshold."""
        spans = cyclic_slices(acc.numel(), step.index, comm.world_size)
        start, stop = spans[comm.rank]
        mine = acc[start:stop] if step.scales is None else step.scales.part(start, stop).scaled(acc[start:stop])
        found = yield from self.threshold_rule.search(state, Search(mine, acc.numel(), spans, step, comm))
        return Selection(found.indices, found.counts, spans, found.threshold)

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the messages of the rule; see Selector."""
        calls = self.threshold_rule.calls(target_count(density, layout.numel), layout.numel)
        return Choosing(calls=calls, knows_counts=True, searches="range")
