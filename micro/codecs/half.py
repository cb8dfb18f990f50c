"""The 16-bit codecs: IEEE half precision and bfloat16."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs.base import Codec, Key, from_bytes, to_bytes
from micro.kernels.code import Code, Kind


class _Cast(Codec):
    wire_dtype: ClassVar[torch.dtype]
    code: ClassVar[Code]

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        return 2 * count

    def encode(self, values: Tensor, key: Key) -> Tensor:
        largest = torch.finfo(self.wire_dtype).max
        return to_bytes(values.to(self.wire_dtype).clamp(-largest, largest))

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(wire, self.wire_dtype).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Half(_Cast):
    """Send values as IEEE half precision, two bytes each, clamped to +-65,504; rounding errors stay in the residual."""

    name: ClassVar[str] = "half"
    wire_dtype: ClassVar[torch.dtype] = torch.float16
    code: ClassVar[Code] = Code(Kind.HALF)


@dataclass(frozen=True, slots=True, kw_only=True)
class BFloat16(_Cast):
    """Send values as bfloat16: two bytes, the range of single precision, eight bits of significand."""

    name: ClassVar[str] = "bfloat16"
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16
    code: ClassVar[Code] = Code(Kind.BFLOAT16)
