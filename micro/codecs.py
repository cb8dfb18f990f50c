"""What travels: values in the form that they take on the wire. Indices travel as int32."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class Codec(ABC):
    """A form of values on the wire. ``decode(encode(x))`` is what the receivers get; the rest stays in the residual."""

    name: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Return ``values`` (k,) as they travel."""

    @abstractmethod
    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what ``encode`` made (k,) as numbers of ``dtype``."""


class Raw(Codec):
    """Values travel as they are."""

    name = "raw"
    lossless = True

    def encode(self, values: Tensor) -> Tensor:
        """Return the values themselves."""
        return values

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values themselves."""
        return wire.to(dtype)


class Half(Codec):
    """Values travel as IEEE half precision, two bytes each, cut at +-65,504; the rounding stays in the residual."""

    name = "half"
    lossless = False

    def encode(self, values: Tensor) -> Tensor:
        """Return the values rounded to half precision."""
        largest = torch.finfo(torch.float16).max
        return values.to(torch.float16).clamp(-largest, largest)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the halves as ``dtype``."""
        return wire.to(dtype)


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Raw, Half)}
