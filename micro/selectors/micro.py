"""MiCRO: one threshold, and an exclusive slice of the vector for each rank."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from micro.comm import Comm
from micro.interleaving import DealtBlocks
from micro.partition import cyclic_slices
from micro.requests import Reduction
from micro.selectors.base import Selector
from micro.selectors.micro_rules.agreed import Agreed
from micro.selectors.micro_rules.base import Found, Search, ThresholdRule
from micro.selectors.micro_rules.published import Published
from micro.selectors.micro_rules.repaired import Repaired
from micro.sparse import Overlap, Selection, Step


class _RotatingSlices(Selector[Any]):
    """Select by one threshold inside a rotating, exclusive slice of the vector.

    Each rank searches one of world_size equal slices, so index sets never overlap (no build-up) and the search costs
    numel / world_size. All ranks use the same threshold, which the subclass's rule sets.
    """

    overlap: ClassVar[Overlap] = Overlap.DISJOINT
    takes_scales: ClassVar[bool] = True
    threshold_rule: ClassVar[ThresholdRule[Any]]

    def start(self) -> Any:
        """Return the rule's state before the first step."""
        return self.threshold_rule.start()

    def load(self, saved: dict[str, Any]) -> Any:
        """Return the state that ``save`` described."""
        return self.threshold_rule.load(saved)

    def select(self, state: Any, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the indices of this rank's slice that pass the step's threshold."""
        spans = cyclic_slices(acc.numel(), step.index, comm.world_size)
        start, stop = spans[comm.rank]
        scales = None if step.scales is None else step.scales.part(start, stop)
        search = Search(acc[start:stop], acc.numel(), spans, step, comm, scales)
        found = yield from self.threshold_rule.search(state, search)
        return _selection(found, found.indices, spans=spans, everyone=found.everyone)


def _selection(
    found: Found, indices: Tensor, *, spans: tuple[tuple[int, int], ...] | None = None, everyone: Tensor | None = None
) -> Selection:
    """Return what a search found, as a selection of these indices."""
    return Selection(
        indices,
        counts=found.counts,
        spans=spans,
        threshold=found.threshold,
        everyone=everyone,
        overfull=found.overfull,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro(_RotatingSlices):
    """Select exactly k by one threshold, agreed in the same step, inside a rotating, exclusive slice.

    The counts that ranks exchange anyway become a histogram, from which all ranks derive the cut that gives k in the
    same step.

    Source: slices and their rotation are those of Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967. Differences: the
    threshold is not steered but found in each step (`micro_rules.agreed`); an empty slice sends nothing (the code sends
    one arbitrary coordinate); int32 indices; k is at least 1. `RepairedMicro` steers; `PublishedMicro` follows the
    public code.

    Args:
        slack: indices travel together with the counts: one all-gather less in each step. Its messages have room for the
            most that a slice gave in the last step, this share of it more, and half its root, each in as many bytes as
            a place in the slice needs (2 up to 65,536 elements). Where a slice gives more than that, or less by as
            much, its step takes the collective that was to be saved. None:
            indices travel by themselves, exactly as many as there are.
        block: slices are interleaved: a slice has every world_size-th block of so many elements, and so a share of
            every layer of some length. Without numba, and on an accelerator, it is copied, and packed indices are as
            long as those of the whole vector. None: a slice is one range.

    Raises:
        ValueError: a slack that is negative or 1 and more, or blocks without elements.
    """

    slack: float | None = None
    block: int | None = None
    name: ClassVar[str] = "micro"
    rule: ClassVar[str] = "agreed"

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"block of {self.name} must be at least 1, got {self.block}")
        if self.slack is not None and not 0 <= self.slack < 1:
            raise ValueError(f"slack of {self.name} must be in [0, 1), got {self.slack}")

    def select(self, state: Any, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the indices of this rank's range, or of its blocks, that pass the step's threshold."""
        if self.block is None:
            return (yield from _RotatingSlices.select(self, state, acc, step, comm))
        dealt = DealtBlocks(acc.numel(), comm.world_size, self.block)
        search = Search(acc, acc.numel(), dealt.spans(step.index), step, comm, dealt=dealt)
        found = yield from self.threshold_rule.search(state, search)
        indices = dealt.places(found.indices, step.index, comm.rank)
        if found.everyone is None:
            return _selection(found, indices)
        return _selection(found, indices, everyone=dealt.places_of_all(found.everyone, found.counts, step.index))

    @property
    def takes_scales(self) -> bool:  # type: ignore[override]  # depends on the setting
        """Whether slices are ranges."""
        return self.block is None

    @property
    def sends_indices(self) -> bool:  # type: ignore[override]  # depends on the setting
        """Whether indices travel with the counts."""
        return self.slack is not None

    @property
    def threshold_rule(self) -> ThresholdRule[Any]:  # type: ignore[override]  # it has a setting here
        """The rule, which sends candidates too where there is a slack."""
        return Agreed(self.slack)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedMicro(_RotatingSlices):
    """Select about k by a threshold that follows the last step's count, inside a rotating, exclusive slice.

    The controller is symmetric and takes its step from the tail itself (`micro_rules.repaired`).

    Source: Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967. Differences: the controller is not the paper's; the
    threshold starts from the gradient's own quantile (the code: from 1 / (2 sqrt k)); an empty slice sends nothing (the
    code sends one arbitrary coordinate); int32 indices; k is at least 1.
    """

    name: ClassVar[str] = "micro"
    rule: ClassVar[str] = "repaired"
    is_default: ClassVar[bool] = False
    threshold_rule: ClassVar[ThresholdRule[Any]] = Repaired()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedMicro(_RotatingSlices):
    """Select by the threshold of the authors' public code, step for step, inside a rotating, exclusive slice.

    What is kept of the code stands in `micro_rules.published`.

    Source: Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967, and its public code. Differences: int32 indices; k is at
    least 1.
    """

    name: ClassVar[str] = "micro"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False
    threshold_rule: ClassVar[ThresholdRule[Any]] = Published()
