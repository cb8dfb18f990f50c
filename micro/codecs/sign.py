"""The sign codec: one bit per value, and the mean magnitude of each block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key
from micro.codecs.bits import num_packed_bytes, pack, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign(Codec):
    """Send the sign of each value; it is decoded to the mean magnitude of its block.

    The mean magnitude is the factor with the smallest error, so the codec works with a residual, and only with one.
    Zero counts as positive. Bytes: 1/8 for each value, four for each block.

    Args:
        block: values that share a magnitude.

    Raises:
        ValueError: block is less than 1.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, arXiv 1901.09847 (the scaled sign).
    Differences: a magnitude for each block instead of each layer; the learning rate stays outside the residual.
    """

    block: int = 1024
    name: ClassVar[str] = "sign"

    def __post_init__(self) -> None:
        blocks.check_block(self.name, self.block)

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return one bit per value, in whole bytes, plus four bytes per block."""
        return num_packed_bytes(count, 1) + blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the mean magnitudes of the blocks, then a bit for each value: 1 where it is negative."""
        values = blocks.single(values)
        means = blocks.of_blocks(_mean_magnitude, self.block, values)
        return blocks.join(means, pack(values < 0, 1))

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return plus or minus the mean magnitude of each value's block."""
        means, packed = blocks.parted(wire, blocks.num_blocks(count, self.block))
        signs = unpack(packed, count, 1).to(torch.float32).mul_(-2).add_(1)
        return blocks.multiply_(signs, means, self.block).to(dtype)


def _mean_magnitude(rows: Tensor) -> Tensor:
    return blocks.sums(blocks.over(rows, rows.shape[1]).abs_())  # a sum before the division might overflow
