"""A bucket of DDP on its way through a reduction, and back to DDP."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from micro.flat import Layout


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of DDP, or a part of one.

    Attributes:
        layout: of its gradients in the vector ``grad`` (numel,).
        gradients: views of ``grad``, one per parameter, where DDP looks for unused parameters; else empty.
        buffer: what DDP gets back: ``grad``, or that of which it is a part.
        future: what DDP waits for; None where another part of the bucket follows.
    """

    layout: Layout
    grad: Tensor
    gradients: Sequence[Tensor]
    buffer: Tensor
    future: torch.futures.Future[Tensor] | None

    def check(self) -> None:
        """Raise ValueError unless the layout fits the vector: compiled loops would write beyond its end."""
        given, expected = self.grad.numel(), self.layout.numel
        if given != expected:
            raise ValueError(
                f"bucket of '{self.layout.names[0]}' holds {given} elements, its parameters {expected}: "
                "parameters must keep the shape and dtype that they had when DDP was built"
            )

    def put_back(self) -> None:
        """Give DDP its bucket, with the last part."""
        if self.future is not None and not self.future.done():
            self.future.set_result(self.buffer)
