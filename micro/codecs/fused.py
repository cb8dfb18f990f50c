"""Codecs that compiled loops serve in one pass over the values, and torch elsewhere, with the same bits."""

from abc import abstractmethod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.base import Codec, Key
from micro.health import Finite


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
    def encoding(self, loops: ModuleType, wire: Tensor, count: int, key: Key) -> Any:
        """Return the Encoding of ``loops``, which is micro.kernels.codes, that fills ``wire`` of so many values."""

    @abstractmethod
    def decoding(self, loops: ModuleType, wires: Tensor, count: int, divisor: float) -> Any:
        """Return the Decoding of ``loops`` that reads the sum of R messages, divided."""

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the values as they travel; see Codec."""
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        if kernels.codes_for(values) is None:
            return self.encode_in_torch(values, key)
        wire = torch.empty(self.num_bytes(values.numel(), values.dtype), dtype=torch.uint8)
        self.encode_into_(values, key, wire)
        return wire

    def encode_into_(
        self,
        values: Tensor,
        key: Key,
        wire: Tensor,
        rest: Tensor | None = None,
        *,
        weight: float = 0.0,
        grad: Tensor | None = None,
    ) -> int | None:
        """Fill ``wire`` and ``rest``; see Codec."""
        loops = kernels.codes_for(values, *([] if rest is None else [rest]))
        if loops is None or not values.numel():
            return super().encode_into_(values, key, wire, rest, weight=weight, grad=grad)
        first_bad = None
        if grad is not None and kernels.codes_for(grad) is None:
            first_bad, grad = kernels.absorb_(values, grad), None
        found: int | None = loops.encode(
            self.encoding(loops, wire, values.numel(), key), loops.Values.of(values, rest, weight, grad)
        )
        return found if grad is not None else first_bad

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the values that were sent; see Codec."""
        values = torch.empty(count, dtype=dtype, device=wire.device)
        loops = kernels.codes_for(values)
        if not count:
            return values
        if loops is None:
            return self.decode_in_torch(wire, count, dtype)
        loops.decode(self.decoding(loops, wire[None], count, 1.0), values)
        return values

    def decode_mean_into_(self, wires: Tensor, values: Tensor, divisor: float = 1.0) -> Finite:
        """Fill ``values`` with the mean of messages; see Codec."""
        loops = kernels.codes_for(values)
        if loops is None or not values.numel():
            return super().decode_mean_into_(wires, values, divisor)
        is_finite: bool = loops.decode(self.decoding(loops, wires, values.numel(), divisor), values)
        return is_finite

    def encode_mean_into_(
        self,
        wires: Tensor,
        divisor: float,
        key: Key,
        wire: Tensor,
        memory: Tensor,
        rest: Tensor | None = None,
        *,
        weight: float = 0.0,
    ) -> None:
        """Fill ``wire`` and ``rest``; see Codec. Most codecs leave ``memory`` alone."""
        count, loops = memory.numel(), kernels.codes_for(memory, *([] if rest is None else [rest]))
        if loops is None or not count:
            super().encode_mean_into_(wires, divisor, key, wire, memory, rest, weight=weight)
        else:
            decoding = self.decoding(loops, wires, count, divisor)
            loops.recode(decoding, self.encoding(loops, wire, count, key), memory, rest, weight)
