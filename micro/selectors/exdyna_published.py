"""ExDyna as in its public code: MiCRO's published threshold, and blocks that move by the last step's counts."""

from dataclasses import dataclass
from typing import Any, ClassVar

from micro.requests import Reduction
from micro.selectors.micro_rules.base import Found, Search, ThresholdRule
from micro.selectors.micro_rules.published import Published
from micro.selectors.moving_blocks import ExDynaState, Grid, MovingBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedExDyna(MovingBlocks):
    """Select by MiCRO's published threshold inside partitions that move by the last counts: the public code's steps.

    A block moves only between a partition above ``tolerance`` times the mean and a neighbour below the mean by as much,
    by the last step's counts, in a sweep that foresees what each move changes.

    Args:
        num_blocks, alignment, tolerance, smallest_share: see `MovingBlocks`.

    Source: Yoon and Oh, ExDyna, CCGrid 2024, arXiv 2402.13781, and its public code, whose constants are the defaults.
    Differences, where the code fails: an empty partition sends nothing; a single rank searches everything and steers by
    its own count; nothing moves where the mean count is 0; int32 indices; k is at least 1.

    Raises:
        ValueError: a setting out of range.
    """

    name: ClassVar[str] = "exdyna"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False
    threshold_rule: ClassVar[ThresholdRule[Any]] = Published()

    def grid(self, numel: int) -> Grid:
        """Return blocks that are rounded down to the alignment; what is left over belongs to the last partition."""
        size = numel // self.num_blocks
        return Grid(numel, self.num_blocks, size - size % self.alignment)

    def move_blocks(self, state: ExDynaState, grid: Grid) -> None:
        """Move blocks between neighbours on either side of the mean; each carries the mean density."""
        n, loads = len(state.blocks), state.loads
        found = sum(loads)
        mean, moved = found // n, int(grid.block_size * (found / grid.numel))
        upper, lower = self.tolerance, round(1 / self.tolerance, 5)  # the code writes 1.05 and 0.95238
        for part in range(n - 1 if mean else 0):
            left, right = loads[part] / mean, loads[part + 1] / mean
            if left > upper and right < lower:
                self.move_block(state, grid, part, part + 1, moved)
            elif left < lower and right > upper:
                self.move_block(state, grid, part + 1, part, moved)

    def steps_per_load(self, world_size: int) -> int:
        """Return 1: only the last step counts."""
        return 1

    def search(self, state: ExDynaState, search: Search) -> Reduction[Found]:
        """Return what passes the threshold; a single rank counts too, where MiCRO's code counts nothing."""
        found = yield from self.threshold_rule.search(state.threshold, search)
        state.threshold.last_count = sum(found.counts)
        return found
