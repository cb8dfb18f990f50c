"""ExDyna: one threshold, and exclusive partitions whose borders move until all ranks find equally much."""

from dataclasses import dataclass
from typing import Any, ClassVar

from micro.selectors.micro_rules.agreed import Agreed
from micro.selectors.micro_rules.base import ThresholdRule
from micro.selectors.moving_blocks import ExDynaState, Grid, MovingBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ExDyna(MovingBlocks):
    """Select exactly k by one threshold inside rotating, exclusive partitions that shrink where much is found.

    Blocks move over the border between neighbours until all ranks find equally many indices (the gather of indices
    waits for the longest list), while index sets never overlap. A block moves whenever the loads of two neighbours
    differ by more than ``tolerance``, so that load also spreads between partitions that are both overloaded. Loads are
    means over a whole turn, in which every rank searched every partition once, so that one rank's larger gradients are
    not taken for a partition's. The threshold is the one that all ranks agree on within the step (as in `Micro`).

    Costs per step: a scan of about numel / world_size elements, and world_size additions; no bytes beyond `Micro`'s.

    Args:
        num_blocks, alignment, tolerance, smallest_share: see `MovingBlocks`.

    Source: Yoon and Oh, ExDyna, CCGrid 2024, arXiv 2402.13781, and its public code, whose constants are the defaults.
    Differences: the threshold, and when blocks move (see above); blocks are rounded up to the alignment, the last one
    being shorter (the code rounds down and leaves up to num_blocks * alignment - 1 elements to the last partition, or
    all of a vector shorter than that); int32 indices; k is at least 1. `PublishedExDyna` follows the public code.

    Raises:
        ValueError: a setting out of range.
    """

    name: ClassVar[str] = "exdyna"
    rule: ClassVar[str] = "repaired"
    threshold_rule: ClassVar[ThresholdRule[Any]] = Agreed()

    def grid(self, numel: int) -> Grid:
        """Return blocks that are rounded up to the alignment; the last one may be shorter."""
        size = _ceil_div(numel, self.num_blocks)
        if size >= self.alignment:
            size = _ceil_div(size, self.alignment) * self.alignment
        return Grid(numel, _ceil_div(numel, size), size)

    def move_blocks(self, state: ExDynaState, grid: Grid) -> None:
        """Move blocks from the busier of two neighbours; each carries that one's density."""
        blocks, loads = state.blocks, state.loads
        for part in range(len(blocks) - 1):
            giver, taker = (part, part + 1) if loads[part] > loads[part + 1] else (part + 1, part)
            if loads[giver] > self.tolerance * loads[taker]:
                self.move_block(state, grid, giver, taker, loads[giver] / max(blocks[giver], 1))

    def steps_per_load(self, world_size: int) -> int:
        """Return the steps of a whole turn."""
        return world_size


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
