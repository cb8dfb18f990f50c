"""The raw codec: values without encoding."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs.base import Codec, Key, from_bytes, to_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw(Codec):
    """Send values unencoded, four bytes each in single precision; an all-reduce can add them."""

    name: ClassVar[str] = "raw"
    lossless: ClassVar[bool] = True

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the size of ``count`` numbers of ``dtype``."""
        return count * dtype.itemsize

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the values, viewed as bytes."""
        return to_bytes(values)

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the bytes, viewed as values."""
        return from_bytes(wire, dtype)
