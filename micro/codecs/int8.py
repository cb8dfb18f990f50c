"""The int8 codec: integers from -127 to 127 with one scale per block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key
from micro.kernels.code import Code, Kind
from micro.values.randomness import uniform, words

LEVELS = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(Codec):
    """Send values as integers, -127 to 127, in units of 1/127 of the largest magnitude of their block.

    Bytes: one for each value, four for each block's step.

    Args:
        block: values that share a step. 256 adds 1/64 to the message; one large value, or a neighbouring layer of
            another scale, coarsens few others.
        stochastic: round at random, so that the expected value is exact, instead of to the nearest. With a residual,
            rounding to the nearest is better: its worst squared error is a quarter.

    Raises:
        ValueError: block is less than 1.

    Source: linear quantisation with a shared scale, e.g. Dettmers, 8-Bit Approximations for Parallelism in Deep
    Learning, ICLR 2016, arXiv 1511.04561. Differences: the scale belongs to a block, not to a whole tensor.
    """

    block: int = 256
    stochastic: bool = False
    name: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        blocks.check_block(self.name, self.block)

    @property
    def code(self) -> Code | None:
        """The code for the compiled loops, which round to the nearest."""
        return None if self.stochastic else Code(Kind.INT8, self.block)

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return a byte for each value and four for each block."""
        return count + blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the steps of the blocks, then the multiples."""
        values = blocks.single(values)
        steps = blocks.over(blocks.largest_magnitudes(values, self.block).clamp_max_(blocks.LARGEST), LEVELS)
        multiples = blocks.divided(values, steps, self.block)
        if self.stochastic:
            multiples.add_(uniform(words(*key), values.numel(), values.device)).floor_()
        else:
            multiples.round_()
        return blocks.join(steps, multiples.clamp_(-LEVELS, LEVELS).to(torch.int8).view(torch.uint8), highest=LEVELS)

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the multiples times their steps."""
        steps, codes = blocks.parted(wire, blocks.num_blocks(count, self.block))
        return blocks.multiply_(codes.view(torch.int8).to(torch.float32), steps, self.block).to(dtype)
