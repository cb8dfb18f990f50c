"""Where the messages of a vector's parts lie: a message for each of n equal parts, one after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from micro.codecs.base import Codec
from micro.values.partition import equal_slices


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The messages of a vector's n neighbouring parts, each with as many bytes behind it as ``gap`` says.

    Attributes:
        sizes: bytes from the begin of each message to that of the next.
        gap: bytes behind each message that are not its own.
        rows: for each part, where it begins and ends, then where its message does.
    """

    sizes: tuple[int, ...]
    gap: int
    rows: tuple[tuple[int, int, int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages, with what lies behind them."""
        return self.rows[-1][3] + self.gap

    def others(self, own: int, *, has_own: bool) -> Iterator[tuple[int, slice, slice]]:
        """Yield each part but ``own``: its number, where its values lie, and where its message does.

        Args:
            has_own: whether that part's message is there too; else those behind it begin earlier.
        """
        for place, (start, stop, begin, end) in enumerate(self.rows):
            if place != own:
                shift = 0 if has_own or place < own else self.sizes[own]
                yield place, slice(start, stop), slice(begin - shift, end - shift)

    def last_bytes(self, wires: Tensor) -> Tensor:
        """Return the byte (n,) before the begin of each next message, of ``wires`` that hold all of them."""
        size = self.sizes[0]
        num_longer = self.sizes.count(size)
        longer, shorter = wires[: num_longer * size], wires[num_longer * size :]
        ends = longer.view(num_longer, -1)[:, -1]
        if num_longer == len(self.sizes):
            return ends
        return torch.cat([ends, shorter.view(len(self.sizes) - num_longer, -1)[:, -1]])


@lru_cache(maxsize=512)  # called at every step
def part_messages(numel: int, num_parts: int, codec: Codec, dtype: torch.dtype) -> tuple[Messages, Messages]:
    """Return the messages in which the `equal_slices` of ``numel`` values travel, and those with a byte behind each."""
    parts = equal_slices(numel, num_parts)
    sizes = [codec.num_bytes(stop - start, dtype) for start, stop in parts]
    return _messages(parts, sizes, 0), _messages(parts, sizes, 1)


def _messages(parts: Sequence[tuple[int, int]], sizes: Sequence[int], gap: int) -> Messages:
    ends = list(accumulate((size + gap for size in sizes), initial=0))
    rows = tuple((*part, begin, begin + size) for part, begin, size in zip(parts, ends, sizes, strict=False))
    return Messages(tuple(size + gap for size in sizes), gap, rows)
