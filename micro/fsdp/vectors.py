"""Copy the gradients of a module's shards into one vector, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from micro.values.flat import Layout


@dataclass(frozen=True, slots=True)
class ShardVector:
    """The gradients of an FSDP module's shards on this rank.

    Attributes:
        layout: of the parameters whose shard on this rank is not empty.
        grad: (numel,) the gradients; zero for a parameter without one.
        used: names of parameters with a gradient on any replica; the others get no update.
        parameters: all of the module, by name.
        is_view: whether ``grad`` shares memory with the gradients, so that nothing is copied back.
    """

    layout: Layout
    grad: Tensor
    used: frozenset[str]
    parameters: Mapping[str, nn.Parameter]
    is_view: bool

    def put_back(self) -> None:
        """Write ``grad`` into the gradients of the parameters that any replica used."""
        if self.is_view:
            return
        pieces = self.layout.views(self.grad)
        for name in self.used & pieces.keys():
            put(self.parameters[name], pieces[name])


def vector_of(
    parameters: Mapping[str, nn.Parameter], layout: Layout, used: frozenset[str], dtype: torch.dtype
) -> ShardVector:
    """Return the gradients of ``parameters`` in the order of ``layout``.

    FSDP stores the gradients of a module as views of one vector. If they still are, in this dtype and without padding,
    nothing is copied.
    """
    gradients = {name: own_gradient(parameters[name]) for name in layout.names}
    present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    if used.issuperset(layout.names) and len(present) == len(gradients):
        view = _as_one(list(present.values()), dtype)
        if view is not None:
            return ShardVector(layout, view, used, parameters, is_view=True)
    device = own(parameters[layout.names[0]]).device
    vector = torch.zeros(layout.numel, dtype=dtype, device=device)
    for name, piece in layout.views(vector).items():
        if name in present:
            piece.copy_(present[name])
    return ShardVector(layout, vector, used, parameters, is_view=False)


def own(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor; memory is shared."""
    with torch.no_grad():  # otherwise autograd records each call
        shard: Tensor = tensor.to_local()
    return shard.detach()


def own_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of a parameter's gradient, or None; memory is shared."""
    return None if parameter.grad is None else own(parameter.grad)


def put(parameter: nn.Parameter, values: Tensor) -> None:
    """Make ``values`` this rank's shard of the parameter's gradient."""
    gradient = own_gradient(parameter)
    if gradient is not None:
        gradient.copy_(values)
        return
    from torch.distributed.tensor import DTensor  # slow to import, rarely needed

    whole: Any = parameter
    parameter.grad = DTensor.from_local(
        values.to(parameter.dtype, copy=True),
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _as_one(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return the vector that consists of exactly these views, in order and without gaps, or None."""
    first, place = gradients[0], gradients[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for gradient in gradients:
        starts_here = gradient.storage_offset() == place and gradient.untyped_storage().data_ptr() == memory
        if not starts_here or gradient.dtype != dtype or not gradient.is_contiguous():
            return None
        place += gradient.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))
