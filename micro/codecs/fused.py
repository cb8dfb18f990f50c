"""Codecs that numba's loops serve in few passes, some Triton's kernels, and torch elsewhere: the same bits."""

from abc import abstractmethod
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.agreeing import serving
from micro.codecs.base import Codec, Key
from micro.codecs.messages import Messages
from micro.health import Finite, index_of
from micro.randomness import words_of_each


class FusedCodec(Codec):
    """A codec with two forms: in torch, which says what it is and serves every device and dtype, and compiled.

    A subclass says both. Of float32 values the wires and what is decoded are the same bits in both forms, on a CPU and
    on a GPU; a mean of messages whose number is no power of two is divided by torch in another way on a GPU.
    """

    has_gpu_form: ClassVar[bool] = False  # whether Triton's kernels code it

    def prepare(self, device: torch.device) -> None:
        """Compare a GPU's code with torch; see Codec."""
        if kernels.is_served(device):
            serving(self, torch.empty(1, device=device))

    @abstractmethod
    def encode_in_torch(self, values: Tensor, key: Key) -> Tensor:
        """Return what ``encode`` returns of one value or more."""

    @abstractmethod
    def decode_in_torch(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return what ``decode`` returns of one value or more."""

    @abstractmethod
    def encoding(self, loops: ModuleType, wire: Tensor, count: int, key: Key) -> Any:
        """Return the Encoding of ``loops`` that fills ``wire`` of so many values; None where they have none.

        Args:
            loops: what `micro.kernels.codes_for` returned.
        """

    @abstractmethod
    def decoding(self, loops: ModuleType, wires: Tensor, count: int, divisor: float) -> Any:
        """Return the Decoding of ``loops`` that reads the sum of R messages, divided; None where they have none."""

    def part_code(self, loops: ModuleType) -> Any:
        """Return the PartCode of ``loops``, the family "part_codes" of `micro.kernels`; None where they have none."""
        return None

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the values as they travel; see Codec."""
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        loops = serving(self, values)
        if loops is None:
            return self.encode_in_torch(values, key)
        wire = torch.empty(self.num_bytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device)
        encoding = self.encoding(loops, wire, values.numel(), key)
        if encoding is None:
            return self.encode_in_torch(values, key)
        loops.encode(encoding, loops.Values.of(values, None, None))
        return wire

    def encode_into_(
        self, values: Tensor, key: Key, wire: Tensor, rest: Tensor | None = None, *, grad: Tensor | None = None
    ) -> int | None:
        """Fill ``wire`` and ``rest``; see Codec."""
        loops = serving(self, values, *([] if rest is None else [rest]))
        encoding = self.encoding(loops, wire, values.numel(), key) if loops is not None and values.numel() else None
        if loops is None or encoding is None:
            return super().encode_into_(values, key, wire, rest, grad=grad)
        first_bad, grad = self._added(values, grad)
        found: int | None = loops.encode(encoding, loops.Values.of(values, rest, grad))
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
        loops = kernels.family("part_codes", *(vector for vector in (values, rest, grad) if vector is not None))
        code = self.part_code(loops) if loops is not None and loops.serves(messages) else None
        if loops is None or code is None:
            return super().encode_others_into_(values, key, wire, messages, own, rest, grad=grad)
        digests = words_of_each(key, len(messages.sizes)) if code.is_random else None
        first_bad: int | None = loops.encode(code, loops.Values.of(values, rest, grad), wire, messages, own, digests)
        return first_bad

    def decode_others_into_(self, wires: Tensor, messages: Messages, own: int, values: Tensor) -> Finite:
        """Fill all parts of ``values`` but ``own``; see Codec. Compiled loops of a CPU do it in one call."""
        loops = kernels.family("part_codes", values)
        code = self.part_code(loops) if loops is not None and loops.serves(messages) else None
        if loops is None or code is None:
            return super().decode_others_into_(wires, messages, own, values)
        is_finite: bool = loops.decode(code, wires, messages, own, values)
        return is_finite

    def _added(self, values: Tensor, grad: Tensor | None) -> tuple[int | None, Tensor | None]:
        """Return what `micro.kernels.absorb_` does of a gradient that no code adds on its way, and one to be added."""
        if grad is None or serving(self, grad) is not None:
            return None, grad
        return index_of(kernels.absorb_(values, grad), values.numel()), None

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the values that were sent; see Codec."""
        values = torch.empty(count, dtype=dtype, device=wire.device)
        loops = serving(self, values)
        if not count:
            return values
        decoding = None if loops is None else self.decoding(loops, wire[None], count, 1.0)
        if loops is None or decoding is None:
            return self.decode_in_torch(wire, count, dtype)
        loops.decode(decoding, values)
        return values

    def decode_mean_into_(self, wires: Tensor, values: Tensor, divisor: float = 1.0) -> Finite:
        """Fill ``values`` with the mean of messages; see Codec."""
        loops = serving(self, values)
        decoding = (
            self.decoding(loops, wires, values.numel(), divisor) if loops is not None and values.numel() else None
        )
        if loops is None or decoding is None:
            return super().decode_mean_into_(wires, values, divisor)
        is_finite: Finite = loops.decode(decoding, values)
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
        count, vectors = values.numel(), (values, mean) if rest is None else (values, mean, rest)
        loops = serving(self, *vectors) if count else None
        if loops is None or not hasattr(loops, "encode_mean"):
            return super().encode_mean_into_(values, wires, key, wire, mean, rest, grad=grad)
        first_bad, grad = self._added(values, grad)
        encoding = self.encoding(loops, wire, count, key)
        decoding, given = self.decoding(loops, wires, count, len(wires) + 1), loops.Values.of(values, rest, grad)
        is_finite, found = loops.encode_mean(encoding, decoding, given, mean, len(wires) + 1)
        return is_finite, first_bad if grad is None else found
