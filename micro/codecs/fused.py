"""Codecs that compiled loops serve in one pass over the values, and torch elsewhere, with the same bits."""

from abc import abstractmethod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.base import Codec, Key


class FusedCodec(Codec):
    """A codec with two forms: in torch, which says what it is and serves every device and dtype, and compiled.

    A subclass says both. Of float32 values on a CPU the wires and what is decoded are the same bits in both forms.
    """

    @abstractmethod
    def encode_in_torch(self, values: Tensor, key: Key) -> Tensor:
        """Return what ``encode`` returns of one value or more."""

    @abstractmethod
    def decode_in_torch(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return what ``decode`` returns of one value or more."""

    @abstractmethod
    def encode_compiled(self, loops: ModuleType, values: Tensor, key: Key, wire: Tensor, rest: Any) -> None:
        """Fill ``wire`` and ``rest`` by a function of ``loops``, which is micro.kernels.codes."""

    @abstractmethod
    def decode_compiled(self, loops: ModuleType, wires: Tensor, values: Tensor, divisor: float) -> None:
        """Fill ``values`` by a function of ``loops``."""

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the values as they travel; see Codec."""
        if kernels.codes_for(values) is None:
            return self.encode_in_torch(values, key) if values.numel() else _no_bytes(values)
        wire = torch.empty(self.num_bytes(values.numel(), values.dtype), dtype=torch.uint8)
        self.encode_into_(values, key, wire)
        return wire

    def encode_into_(
        self, values: Tensor, key: Key, wire: Tensor, rest: Tensor | None = None, *, weight: float = 0.0
    ) -> None:
        """Fill ``wire`` and ``rest``; see Codec."""
        loops = kernels.codes_for(values, *([] if rest is None else [rest]))
        if loops is None:
            super().encode_into_(values, key, wire, rest, weight=weight)
        elif values.numel():
            self.encode_compiled(loops, values, key, wire, loops.Rest(rest, weight))

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the values that were sent; see Codec."""
        values = torch.empty(count, dtype=dtype, device=wire.device)
        loops = kernels.codes_for(values)
        if not count:
            return values
        if loops is None:
            return self.decode_in_torch(wire, count, dtype)
        self.decode_compiled(loops, wire[None], values, 1.0)
        return values

    def decode_mean_into_(self, wires: Tensor, values: Tensor, divisor: float = 1.0) -> None:
        """Fill ``values`` with the mean of messages; see Codec."""
        loops = kernels.codes_for(values)
        if loops is None:
            super().decode_mean_into_(wires, values, divisor)
        elif values.numel():
            self.decode_compiled(loops, wires, values, divisor)


def _no_bytes(values: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=values.device)
