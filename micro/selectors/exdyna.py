"""ExDyna: one threshold, and exclusive partitions whose borders move until all ranks find equally much."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from micro.comm import Comm
from micro.partition import block_spans, equal_sizes
from micro.parts import Rule, check_rule
from micro.selectors.base import Selector
from micro.selectors.micro_rules import RULES, Search
from micro.sparse import Overlap, Selection, Step

THRESHOLDS = {"repaired": RULES["agreed"], "published": RULES["published"]}


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
        loads: indices found per step in each partition, and foreseen since blocks were moved; empty while unknown.
        counts: what was found in each partition since the loads were last set.
        num_steps: how many steps those are.
    """

    threshold: Any
    blocks: list[int] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExDyna(Selector[ExDynaState]):
    """Select by MiCRO's threshold inside rotating, exclusive partitions that shrink where much is found.

    The vector is cut into blocks, and each partition is a run of them. A step moves at most one block over each border
    between partitions, from the one in which more was found lately. So the ranks' counts even out (the gather of
    indices waits for the longest list), while index sets never overlap. Costs per step: a scan of about
    numel / world_size elements, and world_size additions; no bytes beyond those of MiCRO's rule.

    Args:
        rule: 'published', the authors' public code step for step: the threshold of MiCRO's public code; a block moves
            only between a partition above ``tolerance`` times the mean and a neighbour below the mean by as much, by
            the last step's counts, in a sweep that foresees what each move changes. 'repaired': the threshold that all
            ranks agree upon within the step, which gives exactly k; a block moves whenever two neighbours differ by
            more than ``tolerance``, so that load also spreads between partitions that are both overloaded; loads are
            means over a whole turn, in which every rank searched every partition once, so that one rank's larger
            gradients are not taken for a partition's.
        num_blocks: blocks in the vector, at least 1.
        alignment: blocks are a multiple of this many elements where they are that long.
        tolerance: imbalance that is left alone, above 1.
        smallest_share: no partition gives a block when that left it less than this share of the mean partition.

    Source: Yoon and Oh, ExDyna, CCGrid 2024, arXiv 2402.13781, and its public code, whose constants are the defaults.
    Differences of 'repaired': see above; blocks are rounded up to the alignment, the last one being shorter (the code
    rounds down and leaves up to num_blocks * alignment - 1 elements to the last partition, or all of a vector shorter
    than that). Differences of 'published', where the code fails: an empty partition sends nothing; one rank alone
    searches everything and steers by its own count; nothing moves where the mean count is 0. Both: int32 indices; k is
    at least 1.

    Raises:
        ValueError: no such rule, or a setting out of range.
    """

    rule: Rule = "repaired"
    num_blocks: int = 1024
    alignment: int = 32
    tolerance: float = 1.05
    smallest_share: float = 0.25
    name: ClassVar[str] = "exdyna"
    overlap: ClassVar[Overlap] = Overlap.DISJOINT

    def __post_init__(self) -> None:
        check_rule(self)
        for name in ("num_blocks", "alignment"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of exdyna must be at least 1, got {getattr(self, name)}")
        if not self.tolerance > 1:
            raise ValueError(f"tolerance of exdyna must be above 1, got {self.tolerance}")
        if not 0 <= self.smallest_share <= 1:
            raise ValueError(f"smallest_share of exdyna must be in [0, 1], got {self.smallest_share}")

    def start(self) -> ExDynaState:
        """Return the state before the first step."""
        return ExDynaState(THRESHOLDS[self.rule].start())

    def load(self, saved: dict[str, Any]) -> ExDynaState:
        """Return the state that ``save`` described."""
        return ExDynaState(**saved | {"threshold": THRESHOLDS[self.rule].load(saved["threshold"])})

    def select(self, state: ExDynaState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return the indices of this rank's partition that pass the step's threshold."""
        n, numel = comm.world_size, acc.numel()
        grid = self.grid(numel)
        if len(state.blocks) != n:
            state.blocks, state.loads, state.counts, state.num_steps = equal_sizes(grid.num_blocks, n), [], [0] * n, 0
        if state.loads:
            _MOVES[self.rule](self, state, grid)
        partitions = block_spans(state.blocks, grid.block_size, numel)
        spans = tuple(partitions[(step.index + rank) % n] for rank in range(n))
        start, stop = spans[comm.rank]
        found = THRESHOLDS[self.rule].search(state.threshold, Search(acc[start:stop], step, comm))
        if self.rule == "published":
            state.threshold.last_count = sum(found.counts)  # MiCRO's code counts nothing on one rank, this one crashes
        self._learn(state, [found.counts[(part - step.index) % n] for part in range(n)])
        return Selection(found.indices + start, counts=found.counts, spans=spans, threshold=found.threshold)

    def grid(self, numel: int) -> Grid:
        """Return the blocks of a vector of ``numel`` elements."""
        if self.rule == "published":
            size = numel // self.num_blocks
            return Grid(numel, self.num_blocks, size - size % self.alignment)
        size = _ceil_div(numel, self.num_blocks)
        if size >= self.alignment:
            size = _ceil_div(size, self.alignment) * self.alignment
        return Grid(numel, _ceil_div(numel, size), size)

    def _learn(self, state: ExDynaState, counts: list[int]) -> None:
        """Take in what was found in each partition, and set the loads where a turn is over."""
        turn = 1 if self.rule == "published" else len(counts)
        state.counts = [before + count for before, count in zip(state.counts, counts, strict=True)]
        state.num_steps += 1
        if state.num_steps == turn:
            state.loads = [count / turn for count in state.counts]
            state.counts, state.num_steps = [0] * len(counts), 0


def _move_published(selector: ExDyna, state: ExDynaState, grid: Grid) -> None:
    """Move blocks between neighbours on either side of the mean; the foreseen change is that of the mean density."""
    n, loads = len(state.blocks), state.loads
    found = sum(loads)
    mean, moved = found // n, int(grid.block_size * (found / grid.numel))
    upper, lower = selector.tolerance, round(1 / selector.tolerance, 5)  # the code writes 1.05 and 0.95238
    for part in range(n - 1 if mean else 0):
        left, right = loads[part] / mean, loads[part + 1] / mean
        if left > upper and right < lower:
            _move(selector, state, grid, part, part + 1, moved)
        elif left < lower and right > upper:
            _move(selector, state, grid, part + 1, part, moved)


def _move_repaired(selector: ExDyna, state: ExDynaState, grid: Grid) -> None:
    """Move blocks from the busier of two neighbours; the foreseen change is that of its own density."""
    blocks, loads = state.blocks, state.loads
    for part in range(len(blocks) - 1):
        giver, taker = (part, part + 1) if loads[part] > loads[part + 1] else (part + 1, part)
        if loads[giver] > selector.tolerance * loads[taker]:
            _move(selector, state, grid, giver, taker, loads[giver] / max(blocks[giver], 1))


_MOVES: dict[str, Callable[[ExDyna, ExDynaState, Grid], None]] = {
    "repaired": _move_repaired,
    "published": _move_published,
}


def _move(selector: ExDyna, state: ExDynaState, grid: Grid, giver: int, taker: int, load: float) -> None:
    """Move one block, and the load that is thought to lie in it, unless that left the giver too small."""
    if state.blocks[giver] - 1 < selector.smallest_share * grid.num_blocks / len(state.blocks):
        return
    state.blocks[giver] -= 1
    state.blocks[taker] += 1
    state.loads[giver] -= load
    state.loads[taker] += load


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
