"""Offsets of messages in a buffer: one message for each of n equal parts of a vector, one after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from micro.codecs.base import Codec
from micro.values.sparse import equal_slices


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The messages of a vector's n parts, each followed by ``gap`` extra bytes.

    Attributes:
        sizes: bytes of each message including its gap.
        gap: extra bytes after each message.
        rows: for each part its start and stop, then start and stop of its message.
    """

    sizes: tuple[int, ...]
    gap: int
    rows: tuple[tuple[int, int, int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages, including gaps."""
        return self.rows[-1][3] + self.gap

    def others(self, own: int, *, has_own: bool) -> Iterator[tuple[int, slice, slice]]:
        """Yield each part except ``own``: its number, the slice of its values, and that of its message.

        Args:
            has_own: whether the buffer contains the message of ``own``; otherwise later messages begin earlier.
        """
        for place, (start, stop, begin, end) in enumerate(self.rows):
            if place != own:
                shift = 0 if has_own or place < own else self.sizes[own]
                yield place, slice(start, stop), slice(begin - shift, end - shift)

    def last_bytes(self, wires: Tensor) -> Tensor:
        """Return the last byte (n,) of each message's gap; ``wires`` holds all messages."""
        size = self.sizes[0]
        num_longer = self.sizes.count(size)
        longer, shorter = wires[: num_longer * size], wires[num_longer * size :]
        ends = longer.view(num_longer, -1)[:, -1]
        if num_longer == len(self.sizes):
            return ends
        return torch.cat([ends, shorter.view(len(self.sizes) - num_longer, -1)[:, -1]])


@lru_cache(maxsize=512)  # called at every step
def part_messages(numel: int, num_parts: int, codec: Codec, dtype: torch.dtype) -> tuple[Messages, Messages]:
    """Return the messages of the `equal_slices` of ``numel`` values, without gaps and with a gap of one byte."""
    parts = equal_slices(numel, num_parts)
    sizes = [codec.num_bytes(stop - start, dtype) for start, stop in parts]
    return _messages(parts, sizes, 0), _messages(parts, sizes, 1)


def _messages(parts: Sequence[tuple[int, int]], sizes: Sequence[int], gap: int) -> Messages:
    ends = list(accumulate((size + gap for size in sizes), initial=0))
    rows = tuple((*part, begin, begin + size) for part, begin, size in zip(parts, ends, sizes, strict=False))
    return Messages(tuple(size + gap for size in sizes), gap, rows)
