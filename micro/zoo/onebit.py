"""One bit a value: one of two means of its block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key
from micro.codecs.bits import num_packed_bytes, pack, unpack
from micro.kernels.code import Code, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBit(Codec):
    """Values travel as one bit: a negative one counts for the mean of its block's negatives, another for the others'.

    The means leave the smallest error that two numbers can, so that with a residual this is sound; without one it is
    not. Bytes: an eighth for each value, eight for each block.

    Args:
        block: values that share two means.

    Raises:
        ValueError: block is less than 1.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014. Differences: the means are of runs of
    neighbouring values instead of columns of a weight matrix, which a flat vector does not show.
    """

    block: int = 1024
    name: ClassVar[str] = "onebit"

    def __post_init__(self) -> None:
        blocks.check_block(self.name, self.block)

    @property
    def code(self) -> Code | None:
        """The compiled form."""
        return Code(Kind.SIDES, self.block)

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return a bit for each value, in whole bytes, and eight bytes for each block."""
        return num_packed_bytes(count, 1) + 2 * blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the means of the blocks, those of the negatives last, then a bit for each value: 1 for negative."""
        values = blocks.single(values)
        negative = values < 0
        means = [_means(values, ~negative, self.block), _means(values, negative, self.block)]
        return blocks.join(torch.cat(means), pack(negative, 1))

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return one of the two means of each value's block."""
        num_blocks = blocks.num_blocks(count, self.block)
        means, packed = blocks.parted(wire, 2 * num_blocks)
        negative = unpack(packed, count, 1).to(torch.float32)
        upper = blocks.multiply_(1 - negative, means[:num_blocks], self.block)
        return upper.add_(blocks.multiply_(negative, means[num_blocks:], self.block)).to(dtype)


def _means(values: Tensor, chosen: Tensor, block: int) -> Tensor:
    """Return the mean of the ``chosen`` values of every block; 0 where none is chosen."""

    def mean(rows: Tensor, mask: Tensor) -> Tensor:
        counts = mask.sum(1, dtype=torch.float32)
        return blocks.sums((rows / counts.clamp_min(1)[:, None]).masked_fill_(~mask, 0.0))  # a sum might overflow

    return blocks.of_blocks(mean, block, values, chosen)
