"""The FP8 codec: e4m3 floats with one scale per block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key

LARGEST = 448  # largest e4m3 number; there is no Inf


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8(Codec):
    """Send values as e4m3 floats, scaled so that the largest magnitude of each block is 448.

    Compared with `Int8`, small values keep their sign and a relative error of at most 1/16, down to 1/28,672 of their
    block's largest; the largest values are coarser. Bytes: one for each value, four for each block's scale.

    Args:
        block: values that share a scale.

    Raises:
        ValueError: block is less than 1.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv 2209.05433, format E4M3. Differences: one
    scale per block, not per tensor, computed from the values themselves, not from earlier steps.
    """

    block: int = 256
    name: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        blocks.check_block(self.name, self.block)

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return a byte for each value and four for each block."""
        return count + blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the scales of the blocks, then the floats."""
        values = blocks.single(values)
        scales = blocks.over(blocks.largest_magnitudes(values, self.block).clamp_max_(blocks.LARGEST), LARGEST)
        floats = blocks.divided(values, scales, self.block).clamp_(-LARGEST, LARGEST)
        return blocks.join(scales, floats.to(torch.float8_e4m3fn).view(torch.uint8), highest=LARGEST)

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the floats times their scales."""
        scales, codes = blocks.parted(wire, blocks.num_blocks(count, self.block))
        return blocks.multiply_(codes.view(torch.float8_e4m3fn).to(torch.float32), scales, self.block).to(dtype)
