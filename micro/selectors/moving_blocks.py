"""Exclusive partitions of blocks whose borders move from step to step: what ExDyna's two rules share."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from micro.comm import Comm
from micro.partition import block_spans, equal_sizes
from micro.requests import Reduction
from micro.selectors.base import Selector
from micro.selectors.micro_rules.base import Found, Search, ThresholdRule
from micro.sparse import Overlap, Selection, Step


@dataclass(frozen=True, slots=True)
class Grid:
    """A vector of ``numel`` elements as ``num_blocks`` blocks of ``block_size``; what is left over lies at the end."""

    numel: int
    num_blocks: int
    block_size: int


@dataclass(slots=True)
class ExDynaState:
    """What all ranks know before a step.

    Attributes:
        threshold: the state of the threshold's rule.
        blocks: how many blocks each partition has; empty before the first step.
        loads: indices found per step in each partition, adjusted for blocks moved since; empty while unknown.
        counts: what was found in each partition since the loads were last set.
        num_steps: how many steps those are.
    """

    threshold: Any
    blocks: list[int] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingBlocks(Selector[ExDynaState]):
    """Select by one threshold inside rotating, exclusive partitions that shrink where much is found.

    The vector is cut into blocks, and each partition is a run of them. A step moves at most one block over each border
    between partitions, from the one in which more was found lately. A subclass says what counts as more, and sets the
    threshold's rule.

    Args:
        num_blocks: blocks in the vector, at least 1.
        alignment: blocks are a multiple of this many elements where they are that long.
        tolerance: ratio of loads up to which nothing moves, above 1.
        smallest_share: no partition gives a block if it would keep less than this share of the mean partition.

    Raises:
        ValueError: a setting out of range.
    """

    num_blocks: int = 1024
    alignment: int = 32
    tolerance: float = 1.05
    smallest_share: float = 0.25
    overlap: ClassVar[Overlap] = Overlap.DISJOINT
    threshold_rule: ClassVar[ThresholdRule[Any]]

    def __post_init__(self) -> None:
        for name in ("num_blocks", "alignment"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of {self.name} must be at least 1, got {getattr(self, name)}")
        if not self.tolerance > 1:
            raise ValueError(f"tolerance of {self.name} must be above 1, got {self.tolerance}")
        if not 0 <= self.smallest_share <= 1:
            raise ValueError(f"smallest_share of {self.name} must be in [0, 1], got {self.smallest_share}")

    @abstractmethod
    def grid(self, numel: int) -> Grid:
        """Return the blocks of a vector of ``numel`` elements."""

    @abstractmethod
    def move_blocks(self, state: ExDynaState, grid: Grid) -> None:
        """Move blocks between neighbouring partitions by their loads."""

    @abstractmethod
    def steps_per_load(self, world_size: int) -> int:
        """Return over how many steps a partition's load is averaged."""

    def start(self) -> ExDynaState:
        """Return the state before the first step."""
        return ExDynaState(self.threshold_rule.start())

    def load(self, saved: dict[str, Any]) -> ExDynaState:
        """Return the state that ``save`` described."""
        return ExDynaState(**saved | {"threshold": self.threshold_rule.load(saved["threshold"])})

    def select(self, state: ExDynaState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the indices of this rank's partition that pass the step's threshold."""
        n, numel = comm.world_size, acc.numel()
        grid = self.grid(numel)
        if len(state.blocks) != n:
            state.blocks, state.loads, state.counts, state.num_steps = equal_sizes(grid.num_blocks, n), [], [0] * n, 0
        if state.loads:
            self.move_blocks(state, grid)
        partitions = block_spans(state.blocks, grid.block_size, numel)
        spans = tuple(partitions[(step.index + rank) % n] for rank in range(n))
        start, stop = spans[comm.rank]
        found = yield from self.search(state, Search(acc[start:stop], numel, spans, step, comm))
        self._update_loads(state, [found.counts[(part - step.index) % n] for part in range(n)])
        return Selection(found.indices, counts=found.counts, spans=spans, threshold=found.threshold)

    def search(self, state: ExDynaState, search: Search) -> Reduction[Found]:
        """Return what passes the step's threshold in this rank's partition."""
        return self.threshold_rule.search(state.threshold, search)

    def move_block(self, state: ExDynaState, grid: Grid, giver: int, taker: int, load: float) -> None:
        """Move one block, and the load that is thought to lie in it, unless the giver would become too small."""
        if state.blocks[giver] - 1 < self.smallest_share * grid.num_blocks / len(state.blocks):
            return
        state.blocks[giver] -= 1
        state.blocks[taker] += 1
        state.loads[giver] -= load
        state.loads[taker] += load

    def _update_loads(self, state: ExDynaState, counts: list[int]) -> None:
        """Add what was found in each partition, and set the loads once enough steps are counted."""
        num_steps = self.steps_per_load(len(counts))
        state.counts = [before + count for before, count in zip(state.counts, counts, strict=True)]
        state.num_steps += 1
        if state.num_steps == num_steps:
            state.loads = [count / num_steps for count in state.counts]
            state.counts, state.num_steps = [0] * len(counts), 0
