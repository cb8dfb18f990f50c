"""Raw: values as they are."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs.base import Codec, Key, from_bytes, to_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw(Codec):
    """Values travel as they are: four bytes each in single precision. An all-reduce can add them up on its way."""

    name: ClassVar[str] = "raw"
    lossless: ClassVar[bool] = True

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the size of ``count`` numbers of ``dtype``."""
        return count * dtype.itemsize

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the values' own memory."""
        return to_bytes(values)

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the values themselves."""
        return from_bytes(wire, dtype)
