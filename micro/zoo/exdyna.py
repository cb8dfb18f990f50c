"""The selector exdyna (ExDyna): one threshold, and exclusive partitions that are rebalanced by their counts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import target_count
from micro.parts import Rule, check_rule, state_of
from micro.predicted_traffic import Choosing
from micro.selectors.base import Selector
from micro.selectors.micro import Agreed
from micro.selectors.micro_rules import Search, ThresholdRule
from micro.selectors.micro_rules.published import Published
from micro.values.flat import Layout
from micro.values.sparse import Overlap, Selection, Step, cyclic, equal_slices

Move = tuple[int, int, float]
"""A block that changes partitions: from, to, and its estimated load."""


@dataclass(slots=True)
class ExDynaState:
    """What all ranks know before a step.

    Attributes:
        threshold: the state of the threshold's rule.
        blocks: how many blocks each partition has; empty before the first step.
        loads: indices found per step in each partition, adjusted for blocks moved since; empty while unknown.
        counts: indices found in each partition since the loads were last set.
        num_steps: number of steps since then.
    """

    threshold: Any
    blocks: list[int] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_steps: int = 0

    def add(self, counts: list[int], num_steps: int) -> None:
        """Add the counts of a step, and set the loads after ``num_steps`` steps."""
        self.counts = [before + count for before, count in zip(self.counts, counts, strict=True)]
        self.num_steps += 1
        if self.num_steps == num_steps:
            self.loads = [count / num_steps for count in self.counts]
            self.counts, self.num_steps = [0] * len(counts), 0


class Grid(NamedTuple):
    """A vector of ``numel`` elements as ``num_blocks`` blocks of ``block_size``, with a remainder at the end."""

    numel: int
    num_blocks: int
    block_size: int


class Repaired:
    """The repaired rule: blocks move between neighbours by their mean loads; all ranks agree on the threshold."""

    threshold: ClassVar[ThresholdRule[Any]] = Agreed()

    def grid(self, numel: int, num_blocks: int, alignment: int) -> Grid:
        """Return blocks rounded up to the alignment; the last one may be shorter."""
        size = -(-numel // num_blocks)
        if size >= alignment:
            size = -(-size // alignment) * alignment
        return Grid(numel, -(-numel // size), size)

    def moves(self, loads: list[float], blocks: list[int], grid: Grid, tolerance: float) -> Iterator[Move]:
        """Yield moves from the busier of two neighbours; each is applied before the next. A block keeps its density."""
        for part in range(len(blocks) - 1):
            giver, taker = (part, part + 1) if loads[part] > loads[part + 1] else (part + 1, part)
            if loads[giver] > tolerance * loads[taker]:
                yield giver, taker, loads[giver] / max(blocks[giver], 1)

    def steps_per_load(self, world_size: int) -> int:
        """Return the steps over which a load is averaged: a full rotation."""
        return world_size

    def learn(self, state: Any, counts: tuple[int, ...]) -> None:
        """Pass the counts to the threshold's state; here its rule knows them."""


class AsPublished(Repaired):
    """The published rule: blocks move across the mean of the last counts; the threshold is MiCRO's published one."""

    threshold = Published()

    def grid(self, numel: int, num_blocks: int, alignment: int) -> Grid:
        """Return blocks rounded down to the alignment; the remainder belongs to the last partition."""
        size = numel // num_blocks
        return Grid(numel, num_blocks, size - size % alignment)

    def moves(self, loads: list[float], blocks: list[int], grid: Grid, tolerance: float) -> Iterator[Move]:
        """Yield moves between neighbours above and below the mean; a block is assumed to have the mean density."""
        n, found = len(blocks), sum(loads)
        mean, moved = found // n, int(grid.block_size * (found / grid.numel))
        upper, lower = tolerance, round(1 / tolerance, 5)  # the code writes 1.05 and 0.95238
        for part in range(n - 1 if mean else 0):
            left, right = loads[part] / mean, loads[part + 1] / mean
            if left > upper and right < lower:
                yield part, part + 1, moved
            elif left < lower and right > upper:
                yield part + 1, part, moved

    def steps_per_load(self, world_size: int) -> int:
        """Return 1: only the last step counts."""
        return 1

    def learn(self, state: Any, counts: tuple[int, ...]) -> None:
        """Count on a single rank too, unlike MiCRO's code."""
        state.last_count = sum(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExDyna(Selector[ExDynaState]):
    """Select by one threshold inside rotating, exclusive partitions, which are rebalanced by their counts.

    Each partition is a run of blocks of the vector. A step moves at most one block over each border between partitions,
    from the one with more indices lately, until all ranks find equally many (the gather of indices waits for the
    longest list). Index sets never overlap.

    Costs per step: a scan of about numel / world_size elements, and world_size additions; no bytes beyond `Micro`'s.

    Args:
        rule: 'repaired': a block moves if the loads of two neighbours differ by more than ``tolerance``, so load also
            spreads between two overloaded partitions. Loads are means over a full rotation, in which every rank
            searches every partition once, so a rank with larger gradients does not distort them. All ranks agree on the
            threshold within the step, for exactly k. 'published': a block moves only between a partition above
            ``tolerance`` times the mean and a neighbour as far below it, by the last step's counts, in a sweep that
            anticipates the effect of each move. The threshold is that of MiCRO's public code.
        num_blocks: blocks in the vector, at least 1.
        alignment: block sizes are a multiple of it, unless blocks are shorter.
        tolerance: ratio of loads below which nothing moves, above 1.
        smallest_share: a partition keeps at least this share of the mean partition.

    Source: Yoon and Oh, ExDyna, CCGrid 2024, arXiv 2402.13781, and its public code, whose constants are the defaults.
    Differences of both rules: int32 indices; k is at least 1. Repaired: the threshold, and when blocks move; blocks are
    rounded up to the alignment, with a shorter last one (code: rounded down, which leaves up to num_blocks * alignment
    - 1 elements, or all of a shorter vector, to the last partition). Published, where the code fails: an empty
    partition sends nothing; a single rank searches everything and uses its own count; nothing moves if the mean count
    is 0.

    Raises:
        ValueError: a setting out of range.
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
                raise ValueError(f"{name} of {self.name} must be at least 1, got {getattr(self, name)}")
        if not self.tolerance > 1:
            raise ValueError(f"tolerance of {self.name} must be above 1, got {self.tolerance}")
        if not 0 <= self.smallest_share <= 1:
            raise ValueError(f"smallest_share of {self.name} must be in [0, 1], got {self.smallest_share}")

    @property
    def balance(self) -> Repaired:
        """The object that implements the rule."""
        return Repaired() if self.rule == "repaired" else AsPublished()

    def start(self) -> ExDynaState:
        """Return the state before the first step."""
        return ExDynaState(self.balance.threshold.state())

    def load(self, saved: dict[str, Any]) -> ExDynaState:
        """Return the state that ``save`` described."""
        lists = {name: list(saved[name]) for name in ("blocks", "loads", "counts")}  # steps change them in place
        return ExDynaState(**saved | lists | {"threshold": state_of(self.balance.threshold.state, saved["threshold"])})

    def select(self, state: ExDynaState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the indices of this rank's partition that pass the step's threshold."""
        n, numel, balance = comm.world_size, acc.numel(), self.balance
        grid = balance.grid(numel, self.num_blocks, self.alignment)
        if len(state.blocks) != n:
            state.blocks = [stop - start for start, stop in equal_slices(grid.num_blocks, n)]
            state.loads, state.counts, state.num_steps = [], [0] * n, 0
        for giver, taker, load in balance.moves(state.loads, state.blocks, grid, self.tolerance) if state.loads else ():
            if state.blocks[giver] - 1 >= self.smallest_share * grid.num_blocks / n:
                state.blocks[giver] -= 1
                state.blocks[taker] += 1
                state.loads[giver] -= load
                state.loads[taker] += load
        spans = cyclic(block_spans(state.blocks, grid.block_size, numel), step.index)
        start, stop = spans[comm.rank]
        search = Search(acc[start:stop], numel, spans, step, comm)
        found = yield from balance.threshold.search(state.threshold, search)
        assert found.counts is not None, "the rule's promise"
        balance.learn(state.threshold, found.counts)
        state.add([found.counts[(part - step.index) % n] for part in range(n)], balance.steps_per_load(n))
        return replace(found, spans=spans)

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the messages of the threshold's rule; see Selector."""
        calls = self.balance.threshold.calls(target_count(density, layout.numel), layout.numel)
        return Choosing(calls=calls, knows_counts=True, searches="range")


def block_spans(blocks: Sequence[int], block_size: int, numel: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of consecutive partitions with these numbers of blocks, which cover [0, numel).

    The last partition ends at ``numel``.
    """
    edges = [min(block_size * place, numel) for place in accumulate(blocks, initial=0)]
    edges[-1] = numel
    return tuple(pairwise(edges))
