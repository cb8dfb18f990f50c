"""Codecs that numba's loops serve in one pass, and Triton's kernels on a GPU: the bits are those that torch gives."""

from abc import abstractmethod
from types import ModuleType

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.agreeing import serving
from micro.codecs.base import Codec, Key
from micro.codecs.messages import Messages
from micro.health import Finite, index_of
from micro.kernels.code import Code


class FusedCodec(Codec):
    """A codec with two forms: in torch, which says what it is and serves every device and dtype, and compiled.

    Of float32 values the wires and what is decoded are the same bits in both forms, on a CPU and on a GPU; a mean of
    messages whose number is no power of two is divided by torch in another way on a GPU.
    """

    @property
    @abstractmethod
    def code(self) -> Code | None:
        """The compiled form; None where these settings have none."""

    @abstractmethod
    def encode_in_torch(self, values: Tensor, key: Key) -> Tensor:
        """Return what ``encode`` returns of one value or more."""

    @abstractmethod
    def decode_in_torch(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return what ``decode`` returns of one value or more."""

    def prepare(self, device: torch.device) -> None:
        """Compare a GPU's code with torch; see Codec."""
        self._loops(torch.empty(1, device=device))

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the values as they travel; see Codec."""
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        loops = self._loops(values)
        if loops is None:
            return self.encode_in_torch(values, key)
        wire = torch.empty(self.num_bytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device)
        loops.encode(self.code, values, wire)
        return wire

    def encode_into_(
        self, values: Tensor, key: Key, wire: Tensor, rest: Tensor | None = None, *, grad: Tensor | None = None
    ) -> int | None:
        """Fill ``wire`` and ``rest``; see Codec."""
        loops = self._loops(values, rest) if values.numel() else None
        if loops is None:
            return super().encode_into_(values, key, wire, rest, grad=grad)
        first_bad, grad = self._added(values, grad)
        found: int | None = loops.encode(self.code, values, wire, rest, grad)
        return first_bad if grad is None else found

    def encode_others_into_(
        self,
        values: Tensor,
        key: Key,
        wire: Tensor,
        messages: Messages,
        own: int,
        rest: Tensor | None = None,
        *,
        grad: Tensor | None = None,
    ) -> int | None:
        """Encode all parts of the values but ``own``; see Codec. Compiled loops of a CPU do it in one call."""
        loops = self._loops_of_parts(messages, values, rest, grad)
        if loops is None:
            return super().encode_others_into_(values, key, wire, messages, own, rest, grad=grad)
        first_bad: int | None = loops.encode_parts(self.code, values, wire, messages, own, rest, grad)
        return first_bad

    def decode_others_into_(self, wires: Tensor, messages: Messages, own: int, values: Tensor) -> Finite:
        """Fill all parts of ``values`` but ``own``; see Codec. Compiled loops of a CPU do it in one call."""
        loops = self._loops_of_parts(messages, values)
        if loops is None:
            return super().decode_others_into_(wires, messages, own, values)
        is_finite: bool = loops.decode_parts(self.code, wires, messages, own, values)
        return is_finite

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the values that were sent; see Codec."""
        values = torch.empty(count, dtype=dtype, device=wire.device)
        if not count:
            return values
        loops = self._loops(values)
        if loops is None:
            return self.decode_in_torch(wire, count, dtype)
        loops.decode(self.code, wire[None], values)
        return values

    def decode_mean_into_(self, wires: Tensor, values: Tensor, divisor: float = 1.0) -> Finite:
        """Fill ``values`` with the mean of messages; see Codec."""
        loops = self._loops(values) if values.numel() else None
        if loops is None:
            return super().decode_mean_into_(wires, values, divisor)
        is_finite: Finite = loops.decode(self.code, wires, values, divisor)
        return is_finite

    def encode_mean_into_(
        self,
        values: Tensor,
        wires: Tensor,
        key: Key,
        wire: Tensor,
        mean: Tensor,
        rest: Tensor | None = None,
        *,
        grad: Tensor | None = None,
    ) -> tuple[Finite, int | None]:
        """Fill ``wire``, ``mean`` and ``rest``; see Codec. Compiled loops of a CPU do it in one pass."""
        loops = self._loops(values, mean, rest) if values.numel() else None
        if loops is None or not hasattr(loops, "encode_mean"):
            return super().encode_mean_into_(values, wires, key, wire, mean, rest, grad=grad)
        first_bad, grad = self._added(values, grad)
        is_finite, found = loops.encode_mean(self.code, values, wires, wire, mean, rest, grad)
        return is_finite, first_bad if grad is None else found

    def _loops(self, *vectors: Tensor | None) -> ModuleType | None:
        """Return the module that codes these vectors, `micro.kernels.codes` or what has its names on a GPU, or None."""
        return serving(self, *(vector for vector in vectors if vector is not None))

    def _loops_of_parts(self, messages: Messages, *vectors: Tensor | None) -> ModuleType | None:
        loops = self._loops(*vectors)
        return loops if loops is not None and hasattr(loops, "are_short") and loops.are_short(messages) else None

    def _added(self, values: Tensor, grad: Tensor | None) -> tuple[int | None, Tensor | None]:
        """Return what `micro.kernels.absorb_` does of a gradient that no code adds on its way, and one to be added."""
        if grad is None or self._loops(grad) is not None:
            return None, grad
        return index_of(kernels.absorb_(values, grad), values.numel()), None
