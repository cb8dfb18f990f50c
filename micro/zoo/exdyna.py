"""ExDyna: one threshold, and exclusive partitions whose borders move until all ranks find equally much."""

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
from micro.selectors.micro_rules.agreed import Agreed, Search, ThresholdRule
from micro.selectors.micro_rules.published import Published
from micro.values.flat import Layout
from micro.values.partition import cyclic, equal_sizes
from micro.values.sparse import Overlap, Selection, Step

Move = tuple[int, int, float]
"""A block that changes partitions: the giver, the taker, and the load that is thought to lie in it."""


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

    def add(self, counts: list[int], num_steps: int) -> None:
        """Add what was found in each partition, and set the loads once that many steps are counted."""
        self.counts = [before + count for before, count in zip(self.counts, counts, strict=True)]
        self.num_steps += 1
        if self.num_steps == num_steps:
            self.loads = [count / num_steps for count in self.counts]
            self.counts, self.num_steps = [0] * len(counts), 0


class Grid(NamedTuple):
    """A vector of ``numel`` elements as ``num_blocks`` blocks of ``block_size``; what is left over lies at the end."""

    numel: int
    num_blocks: int
    block_size: int


class Repaired:
    """Blocks move between any two neighbours by their loads over a turn, below an agreed threshold."""

    threshold: ClassVar[ThresholdRule[Any]] = Agreed()

    def grid(self, numel: int, num_blocks: int, alignment: int) -> Grid:
        """Return blocks that are rounded up to the alignment; the last one may be shorter."""
        size = -(-numel // num_blocks)
        if size >= alignment:
            size = -(-size // alignment) * alignment
        return Grid(numel, -(-numel // size), size)

    def moves(self, loads: list[float], blocks: list[int], grid: Grid, tolerance: float) -> Iterator[Move]:
        """Yield moves from the busier of two neighbours, each made before the next; a block carries its density."""
        for part in range(len(blocks) - 1):
            giver, taker = (part, part + 1) if loads[part] > loads[part + 1] else (part + 1, part)
            if loads[giver] > tolerance * loads[taker]:
                yield giver, taker, loads[giver] / max(blocks[giver], 1)

    def steps_per_load(self, world_size: int) -> int:
        """Return over how many steps a load is averaged: those of a whole turn."""
        return world_size

    def learn(self, state: Any, counts: tuple[int, ...]) -> None:
        """Tell the threshold's state what all ranks found; here the rule knows."""


class AsPublished(Repaired):
    """The public code: blocks move across the mean of the last counts, below MiCRO's published threshold."""

    threshold = Published()

    def grid(self, numel: int, num_blocks: int, alignment: int) -> Grid:
        """Return blocks that are rounded down to the alignment; what is left over belongs to the last partition."""
        size = numel // num_blocks
        return Grid(numel, num_blocks, size - size % alignment)

    def moves(self, loads: list[float], blocks: list[int], grid: Grid, tolerance: float) -> Iterator[Move]:
        """Yield moves between neighbours on either side of the mean; a block carries the mean density."""
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
        """Count on a single rank too, where MiCRO's code counts nothing."""
        state.last_count = sum(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExDyna(Selector[ExDynaState]):
    """Select by one threshold inside rotating, exclusive partitions that shrink where much is found.

    The vector is cut into blocks, and each partition is a run of them. A step moves at most one block over each border
    between partitions, from the one in which more was found lately, until all ranks find equally many indices (the
    gather of indices waits for the longest list). Index sets never overlap.

    Costs per step: a scan of about numel / world_size elements, and world_size additions; no bytes beyond `Micro`'s.

    Args:
        rule: 'repaired': a block moves whenever the loads of two neighbours differ by more than ``tolerance``, so that
            load also spreads between partitions that are both overloaded. Loads are means over a whole turn, in which
            every rank searched every partition once, so that one rank's larger gradients are not taken for a
            partition's. The threshold is the one that all ranks agree on within the step, which gives exactly k.
            'published': a block moves only between a partition above ``tolerance`` times the mean and a neighbour below
            the mean by as much, by the last step's counts, in a sweep that foresees what each move changes. The
            threshold is that of MiCRO's public code.
        num_blocks: blocks in the vector, at least 1.
        alignment: blocks are a multiple of this many elements where they are that long.
        tolerance: ratio of loads up to which nothing moves, above 1.
        smallest_share: no partition gives a block if it would keep less than this share of the mean partition.

    Source: Yoon and Oh, ExDyna, CCGrid 2024, arXiv 2402.13781, and its public code, whose constants are the defaults.
    Differences of both rules: int32 indices; k is at least 1. Of the repaired one: the threshold, and when blocks move;
    blocks are rounded up to the alignment, the last one being shorter (the code rounds down and leaves up to
    num_blocks * alignment - 1 elements to the last partition, or all of a vector shorter than that). Of the published
    one, where the code fails: an empty partition sends nothing; a single rank searches everything and steers by its own
    count; nothing moves where the mean count is 0.

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
        """The rule as an object."""
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
            state.blocks, state.loads, state.counts, state.num_steps = equal_sizes(grid.num_blocks, n), [], [0] * n, 0
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
        """Return what the threshold's rule sends; see Selector."""
        calls = self.balance.threshold.calls(target_count(density, layout.numel), layout.numel)
        return Choosing(calls=calls, knows_counts=True, searches="range")


def block_spans(blocks: Sequence[int], block_size: int, numel: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of consecutive partitions of so many blocks each; together they cover [0, numel).

    The last partition ends at ``numel``, whatever the length of its blocks.
    """
    edges = [min(block_size * place, numel) for place in accumulate(blocks, initial=0)]
    edges[-1] = numel
    return tuple(pairwise(edges))
