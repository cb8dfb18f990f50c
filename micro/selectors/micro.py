"""MiCRO: one threshold, and an exclusive slice of the vector for each rank."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from micro.comm import Comm
from micro.density.base import target_count
from micro.flat import Layout
from micro.interleaving import DealtBlocks
from micro.partition import cyclic_slices
from micro.parts import check_rule
from micro.requests import Reduction
from micro.selectors.base import Selector, Traits
from micro.selectors.micro_rules.agreed import Agreed
from micro.selectors.micro_rules.base import Search, ThresholdRule
from micro.selectors.micro_rules.published import Published
from micro.selectors.micro_rules.repaired import Repaired
from micro.sparse import Overlap, Selection, Step
from micro.traffic import Choosing

MicroRule = Literal["agreed", "repaired", "published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro(Selector[Any]):
    """Select by one threshold inside a rotating, exclusive slice of the vector.

    Each rank searches one of world_size equal slices, so index sets never overlap (no build-up) and the search costs
    numel / world_size. All ranks use the same threshold, which the rule sets.

    Args:
        rule: 'agreed': exactly k, by the cut that all ranks derive in the same step from the counts that they exchange
            anyway (`micro_rules.agreed`). 'repaired': about k, by a threshold that follows the last step's count; the
            controller is symmetric and takes its step from the tail itself (`micro_rules.repaired`). 'published': the
            authors' public code, step for step (`micro_rules.published`).
        slack: indices travel together with the counts: one all-gather less in each step. Its messages have room for the
            most that a slice gave in the last step, this share of it more, and half its root, each in as many bytes as
            a place in the slice needs (2 up to 65,536 elements). Where a slice gives more than that, or less by as
            much, its step takes the collective that was to be saved. None: indices travel by themselves, exactly as
            many as there are. For rule 'agreed' alone.
        block: slices are interleaved: a slice has every world_size-th block of so many elements, and so a share of
            every layer of some length. It is copied, and packed indices are as long as those of the whole vector. None:
            a slice is one range. For rule 'agreed' alone.

    Source: Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967. Differences: int32 indices; k is at least 1; but for rule
    'published', the threshold (the code steers it, from 1 / (2 sqrt k) on), and an empty slice sends nothing (the code
    sends one arbitrary coordinate).

    Raises:
        ValueError: no such rule, a slack that is negative or 1 and more, blocks without elements, or a setting of
            another rule.
    """

    rule: MicroRule = "agreed"
    slack: float | None = None
    block: int | None = None
    name: ClassVar[str] = "micro"
    overlap: ClassVar[Overlap] = Overlap.DISJOINT

    def __post_init__(self) -> None:
        check_rule(self, get_args(MicroRule))
        for setting in ("slack", "block"):
            if self.rule != "agreed" and getattr(self, setting) is not None:
                raise ValueError(f"{setting} of {self.name} is a setting of rule=agreed, got rule={self.rule}")
        if self.block is not None and self.block < 1:
            raise ValueError(f"block of {self.name} must be at least 1, got {self.block}")
        if self.slack is not None and not 0 <= self.slack < 1:
            raise ValueError(f"slack of {self.name} must be in [0, 1), got {self.slack}")

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # depends on the settings
        """Scales are taken where slices are ranges; with a slack indices travel with the counts."""
        takes_scales = Traits.TAKES_SCALES if self.block is None else Traits.NONE
        return takes_scales if self.slack is None else takes_scales | Traits.SENDS_INDICES

    @property
    def threshold_rule(self) -> ThresholdRule[Any]:
        """The rule as an object."""
        if self.rule == "agreed":
            return Agreed(self.slack)
        return Repaired() if self.rule == "repaired" else Published()

    @property
    def state(self) -> type[Any]:  # type: ignore[override]  # depends on the rule
        """What the rule remembers."""
        return self.threshold_rule.state

    def select(self, state: Any, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the indices of this rank's range, or of its blocks, that pass the step's threshold."""
        numel, n, index, rank = acc.numel(), comm.world_size, step.index, comm.rank
        dealt = None if self.block is None else DealtBlocks(numel, n, self.block)
        if dealt is not None:
            spans, mine = dealt.spans(index), dealt.slice(acc, index, rank)
        else:
            spans = cyclic_slices(numel, index, n)
            start, stop = spans[rank]
            mine = acc[start:stop] if step.scales is None else step.scales.part(start, stop).scaled(acc[start:stop])
        found = yield from self.threshold_rule.search(state, Search(mine, numel, spans, step, comm))
        if dealt is None:
            return replace(found, spans=spans)
        everywhere = found.all_indices
        if everywhere is not None:
            everywhere = dealt.places_of_all(everywhere, found.counts or (), index)
        return replace(found, indices=dealt.places(found.indices, index, rank), all_indices=everywhere)

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return what the rule sends: counts, and with a slack the indices; see Selector."""
        numel, block = layout.numel, self.block
        longest = -(-numel // world_size) if block is None else DealtBlocks(numel, world_size, block).longest
        calls = self.threshold_rule.calls(target_count(density, numel), longest, numel, world_size)
        return Choosing(
            calls=calls,
            knows_counts=True,
            knows_indices=self.slack is not None and bool(calls),
            searches="range" if block is None else "blocks",
        )
