"""What a codec is: the bytes in which values travel."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.messages import Messages
from micro.health import Finite, all_finite, index_of
from micro.kernels.reference import first_nonfinite
from micro.parts import Part

Key = tuple[int, ...]  # what the randomness of an encoding depends on: (seed, step, rank, place in the message)


class Codec(Part, ABC):
    """A form of values on the wire. ``decode(encode(x))`` is what the receivers get; the rest stays in the residual.

    What is sent has as many bytes as its number of values says, so receivers need no further message. No values take
    no bytes.
    """

    kind: ClassVar[str] = "codec"
    home: ClassVar[str] = "micro.codecs"
    group: ClassVar[str] = "micro.codecs"
    lossless: ClassVar[bool] = False
    diverges_with_feedback: ClassVar[bool] = False  # its errors exceed what it is given: a residual would grow

    def prepare(self, device: torch.device) -> None:
        """Compile what codes values on ``device``, and check it there, so that no step waits for it. Here nothing."""

    @abstractmethod
    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the bytes that ``count`` values take, which are accumulated as ``dtype``."""

    @abstractmethod
    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return finite ``values`` (count,) as they travel: (num_bytes,) uint8.

        Args:
            key: seeds what is random about it: the same key gives the same bytes.
        """

    @abstractmethod
    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return what ``encode`` made of ``count`` values as finite numbers (count,) of ``dtype``."""

    def encode_into_(
        self, values: Tensor, key: Key, wire: Tensor, rest: Tensor | None = None, *, grad: Tensor | None = None
    ) -> int | None:
        """Fill ``wire`` (num_bytes,) with what ``encode`` returns, and ``rest`` with what is left of the values.

        Args:
            rest: (count,) becomes ``values - decoded``; it may be the values' own memory.
            grad: (count,) is added to the values first, as `micro.kernels.absorb_` does; it is used up.

        Returns:
            the index of the first sum with the gradient that is not finite or too large, None where there is none.
        """
        first_bad = None if grad is None else index_of(kernels.absorb_(values, grad), values.numel())
        wire.copy_(self.encode(values, key))
        if rest is not None:
            torch.sub(values, self.decode(wire, values.numel(), values.dtype), out=rest)
        return first_bad

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
        """Encode all parts of the values but ``own``, each by itself; see ``encode_into_``.

        Args:
            key: that of a part has the part's number at its end.
            wire: becomes their messages, one after the other, without one of ``own``.

        Returns:
            the index in ``values`` of the first sum with the gradient that is not finite or too large, or None.
        """
        bads = []
        for place, part, message in messages.others(own, has_own=False):
            left, added = (None if vector is None else vector[part] for vector in (rest, grad))
            bad = self.encode_into_(values[part], (*key, place), wire[message], left, grad=added)
            if bad is not None:
                bads.append(part.start + bad)
        return min(bads, default=None)

    def decode_others_into_(self, wires: Tensor, messages: Messages, own: int, values: Tensor) -> Finite:
        """Fill all parts of ``values`` but ``own`` with what ``wires`` hold; see ``decode_mean_into_``.

        Args:
            wires: the messages of all parts.

        Returns:
            whether all that was filled is finite; on an accelerator the flag is there.
        """
        parts = messages.others(own, has_own=True)
        return all_finite([self.decode_mean_into_(wires[None, wire], values[part]) for _, part, wire in parts])

    def decode_mean_into_(self, wires: Tensor, values: Tensor, divisor: float = 1.0) -> Finite:
        """Fill ``values`` (count,) with the sum of what R messages hold, in their order, divided by ``divisor``.

        Args:
            wires: (R, num_bytes or more) uint8.

        Returns:
            whether all of them are finite; on an accelerator the flag is there.
        """
        count = values.numel()
        for row, wire in enumerate(wires[:, : self.num_bytes(count, values.dtype)]):
            decoded = self.decode(wire, count, values.dtype)
            values.copy_(decoded) if row == 0 else values.add_(decoded)
        if divisor != 1:
            values.div_(divisor)
        if values.device.type == "cpu":
            return first_nonfinite(values) is None
        return torch.isfinite(values).all()

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
        """Fill ``wire`` (num_bytes,) with the mean of the values and of what R messages hold.

        Args:
            values: (count,) have ``grad`` added, as in ``encode_into_``.
            wires: (R, num_bytes) uint8; R may be 0.
            mean: (count,) becomes that mean as ``wire`` says it; it may be the gradient's memory, not the values'.
            rest: (count,) becomes R + 1 times what the mean lost by that.

        Returns:
            whether ``mean`` is finite, and what ``encode_into_`` returns.
        """
        first_bad = None if grad is None else index_of(kernels.absorb_(values, grad), values.numel())
        if len(wires):
            self.decode_mean_into_(wires, mean)
            mean.add_(values).div_(len(wires) + 1)
        else:
            mean.copy_(values)
        self.encode_into_(mean, key, wire, rest)
        if rest is not None:
            rest.mul_(len(wires) + 1)
        return self.decode_mean_into_(wire[None], mean), first_bad


def to_bytes(x: Tensor) -> Tensor:
    """Return the memory of 1-D ``x`` as uint8."""
    return x.contiguous().view(torch.uint8)


def from_bytes(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uint8 ``wire`` read as ``dtype``; copied only where it lies at an odd place of a larger message."""
    if wire.storage_offset() % dtype.itemsize:
        wire = wire.clone()
    return wire.view(dtype)
